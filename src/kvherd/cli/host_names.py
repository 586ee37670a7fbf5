"""The option for the names of a server where no key is wanted."""

from typing import Annotated

import typer

from kvherd.core.fleet.host_names import OPTION

HostNameOption = Annotated[
    list[str] | None,
    typer.Option(
        OPTION,
        metavar="NAME",
        help="A name by which this server may be asked where no key is wanted, once for each; addresses and localhost "
        "always may. A web page could otherwise read here under a name of its own.",
    ),
]
