"""Options of the gateway that bound its load, and its patience with workers."""

from typing import Annotated, Final

import typer

from kvherd.cli.panels import BOUNDS, NUMBER, SECONDS

_DAY_S: Final = 86_400.0
_MOST: Final = 1_000_000

ProbePeriodOption = Annotated[
    float,
    typer.Option(
        rich_help_panel=BOUNDS,
        metavar=SECONDS,
        min=0.5,
        max=3600.0,
        help="Seconds between a worker's word that it is well and the next question.",
    ),
]
ProbeDeadlineOption = Annotated[
    float | None,
    typer.Option(
        rich_help_panel=BOUNDS,
        metavar=SECONDS,
        min=0.5,
        max=3600.0,
        help="Seconds of silence, when a worker is asked whether it is well, that count as one failure; after three it "
        "is down. By default 3, and 7 of a stock SGLang, which may take 20 to answer.",
    ),
]
FirstByteOption = Annotated[
    float,
    typer.Option(
        rich_help_panel=BOUNDS,
        metavar=SECONDS,
        min=0.1,
        max=_DAY_S,
        help="Seconds that a worker may take to begin an answer; then another is tried. An answer that does not "
        "stream begins when it is complete. A worker that is found to be down meanwhile has 15.",
    ),
]
MaxRequestsOption = Annotated[
    int,
    typer.Option(
        rich_help_panel=BOUNDS,
        metavar=NUMBER,
        min=1,
        max=_MOST,
        help="Requests of the data path under way at once; others wait for their turn.",
    ),
]
MaxWaitingOption = Annotated[
    int,
    typer.Option(
        rich_help_panel=BOUNDS,
        metavar=NUMBER,
        min=0,
        max=_MOST,
        help="Requests that may wait for their turn; what comes beyond is a 429.",
    ),
]
MaxWaitOption = Annotated[
    float,
    typer.Option(
        rich_help_panel=BOUNDS,
        metavar=SECONDS,
        min=0.1,
        max=_DAY_S,
        help="Seconds that a request waits for its turn; then a 503.",
    ),
]
LateBindingOption = Annotated[
    float,
    typer.Option(
        rich_help_panel=BOUNDS,
        metavar=SECONDS,
        min=0.0,
        max=3600.0,
        help="While every worker has more seconds of prefill before it than this, requests wait in the gateway, the "
        "shortest first, with the policies kv and prefix_tree; 0 holds none.",
    ),
]
MaxHoldOption = Annotated[
    float,
    typer.Option(
        rich_help_panel=BOUNDS,
        metavar=SECONDS,
        min=0.0,
        max=3600.0,
        help="Seconds that a request is held so; then it is sent all the same.",
    ),
]
