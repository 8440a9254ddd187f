"""What `engine.compat` hands on: the functions of the original documents."""
