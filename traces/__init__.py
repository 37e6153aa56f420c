"""Request traces and routing traces: read, check, import, record and synthesise."""
