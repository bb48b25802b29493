-- What the outcome of a run depends on: done requests that were redirects, and items that could not be stored.
ALTER TABLE ledger ADD COLUMN redirects bigint NOT NULL DEFAULT 0, ADD COLUMN item_errors bigint NOT NULL DEFAULT 0;
