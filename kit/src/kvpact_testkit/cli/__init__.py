"""The kit's commands, which `kvpact` finds as entry points: arguments, texts and exit codes."""
