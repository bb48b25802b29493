-- Clusters: who works under which slot.

-- Each step on a cluster locks its row first: one at a time.
CREATE TABLE cluster (
    id integer GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    name text NOT NULL UNIQUE,
    channel text NOT NULL,                    -- where its members listen
    runner integer NOT NULL,                  -- how many there are to be
    backup integer NOT NULL,
    epoch bigint NOT NULL DEFAULT 0,          -- the last that was given
    told bigint NOT NULL DEFAULT 0            -- the number of the last event
) WITH (fillfactor = 50);

CREATE TABLE member (
    cluster integer NOT NULL,
    name text NOT NULL,
    client bigint NOT NULL,                   -- random, of one process
    session integer NOT NULL,                 -- how often that has joined
    heard_at double precision NOT NULL,
    until double precision NOT NULL,          -- lost then
    fit boolean NOT NULL,
    doing text NOT NULL,
    place text NOT NULL,                      -- its machine and process
    PRIMARY KEY (cluster, name)
) WITH (fillfactor = 20, autovacuum_vacuum_threshold = 1000, autovacuum_vacuum_scale_factor = 0);

CREATE TABLE slot (
    cluster integer NOT NULL,
    index integer NOT NULL,
    holder text,                              -- a member, or nobody
    epoch bigint NOT NULL,                    -- of its holder, or of the last who had it
    lost text,                                -- nobody's: who had it, if that member was lost
    PRIMARY KEY (cluster, index)
) WITH (fillfactor = 50);

CREATE TABLE cluster_event (
    cluster integer NOT NULL,
    number bigint NOT NULL,
    at double precision NOT NULL,
    what text NOT NULL,
    member text NOT NULL,
    slot integer,
    epoch bigint NOT NULL,
    detail text NOT NULL,
    PRIMARY KEY (cluster, number)
);

-- A cluster at one moment, in columns.
CREATE TYPE cluster_view AS (
    runner integer, backup integer,
    members text[], ages double precision[], fit boolean[], doing text[], places text[],
    slots integer[], holders text[], epochs bigint[]
);
