-- How many items were deleted from the log of a run, so that an audit notices missing ones. Null: not known, as this run is
-- older than the column.
ALTER TABLE ledger ADD COLUMN trimmed bigint;
