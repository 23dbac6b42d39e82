"""What several test files share, in modules named by what they give."""
