"""TLS that services share: certificates that are renewed while they run."""
