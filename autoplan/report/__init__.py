"""What people look at: progress and tables on a terminal, plain lines elsewhere, and a page of HTML."""
