-- Clusters, their members and slots. Each call locks the row of its cluster first, so calls run one at a time.
CREATE TABLE cluster (
    id integer GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    name text NOT NULL UNIQUE,
    channel text NOT NULL,                    -- of notifications to its members
    runner integer NOT NULL,                  -- wanted number of Runners
    backup integer NOT NULL,                  -- wanted number of Backup Runners
    epoch bigint NOT NULL DEFAULT 0,          -- the latest epoch of its slots
    events bigint NOT NULL DEFAULT 0          -- the number of the last event
) WITH (fillfactor = 50);

CREATE TABLE member (
    cluster integer NOT NULL,
    name text NOT NULL,
    client bigint NOT NULL,                   -- random number of a process
    session integer NOT NULL,                 -- how often the process has joined
    last_heartbeat double precision NOT NULL, -- time of its last heartbeat
    until double precision NOT NULL,          -- end of its session
    fit boolean NOT NULL,
    doing text NOT NULL,
    place text NOT NULL,                      -- its machine and process
    PRIMARY KEY (cluster, name)
) WITH (fillfactor = 20, autovacuum_vacuum_threshold = 1000, autovacuum_vacuum_scale_factor = 0);

CREATE TABLE slot (
    cluster integer NOT NULL,
    index integer NOT NULL,
    holder text,                              -- a member, or null
    epoch bigint NOT NULL,                    -- of its holder, or of the last holder
    lost text,                                -- the last holder, if it was lost
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

-- A snapshot of a cluster, in columns.
CREATE TYPE cluster_view AS (
    runner integer, backup integer,
    members text[], ages double precision[], fit boolean[], doing text[], places text[],
    slots integer[], holders text[], epochs bigint[]
);
