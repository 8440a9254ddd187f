"""What a decode or an encode of one clip does without: files, cards, programs, measurements."""

#: Point of the core -> full name of the module that fills it.
POINTS = {
    point: f"{__name__}.{module}"
    for point, module in {
        "devices": "distributed.several",
        "notes": "media.latent_note",
        "operands": "eight_bit.mixed",
        "replay": "graphs.recorder",
        "schedules": "tuning.kept",
    }.items()
}
