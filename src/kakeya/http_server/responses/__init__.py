"""Responses and conversations: sessions by name, chained, branched and rebuilt."""
