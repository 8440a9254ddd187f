"""What a decode or an encode of one clip does without: files, cards, programs, measurements."""
