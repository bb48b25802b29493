-- The version of a run's cookies: see functions/13_documents.sql.
CREATE TABLE cookie_version (
    run integer PRIMARY KEY,
    version bigint NOT NULL
) WITH (fillfactor = 10, autovacuum_vacuum_threshold = 1000, autovacuum_vacuum_scale_factor = 0);
