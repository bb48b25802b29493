"""Files that spiders download: where they are stored, and thumbnails of images."""
