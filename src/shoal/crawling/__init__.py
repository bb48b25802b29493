"""One crawl in one process: the loop, the life of a page, the scheduler, the seeder."""
