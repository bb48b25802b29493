-- Members of clusters and their slots. Whatever clients call, but for looking at events, starts with enter_cluster: so one
-- step at a time is taken on a cluster, and none of them meets a member whose time is over.

-- Something happened: remember it in place of what is long ago, and wake those who wait. The cluster is locked.
CREATE OR REPLACE FUNCTION tell(
    _cluster integer, _what text, _member text, _slot integer DEFAULT NULL, _epoch bigint DEFAULT NULL,
    _detail text DEFAULT ''
) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    _told record;
BEGIN
    UPDATE cluster c SET told = c.told + 1 WHERE c.id = _cluster RETURNING c.told, c.channel INTO _told;
    INSERT INTO cluster_event (cluster, number, at, what, member, slot, epoch, detail)
        VALUES (_cluster, _told.told, real_clock(0), _what, _member, _slot, coalesce(_epoch, 0), _detail);
    DELETE FROM cluster_event e WHERE e.cluster = _cluster AND e.number <= _told.told - 200;
    PERFORM pg_notify(_told.channel, '');
END
$$;

-- A member is no more: it has left, or is lost. Then its slot remembers that.
CREATE OR REPLACE FUNCTION part(_cluster integer, _member text, _what text) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    _slot record;
BEGIN
    DELETE FROM member m WHERE m.cluster = _cluster AND m.name = _member;
    UPDATE slot s SET holder = NULL, lost = CASE _what WHEN 'lost' THEN _member END
        WHERE s.cluster = _cluster AND s.holder = _member RETURNING s.index, s.epoch INTO _slot;
    PERFORM tell(_cluster, _what, _member, _slot.index, _slot.epoch);
END
$$;

-- Lock a cluster and part with those who were not heard of. Its number; null if there is no such cluster.
CREATE OR REPLACE FUNCTION enter_cluster(_name text) RETURNS integer LANGUAGE plpgsql AS $$
DECLARE
    _cluster integer;
    _now double precision;
BEGIN
    SELECT c.id INTO _cluster FROM cluster c WHERE c.name = _name FOR NO KEY UPDATE;
    _now := clock(0);
    PERFORM part(_cluster, m.name, 'lost') FROM member m WHERE m.cluster = _cluster AND m.until <= _now ORDER BY m.until;
    RETURN _cluster;
END
$$;

-- The number of a cluster, entered, if this session is one of its members; null if it was lost.
CREATE OR REPLACE FUNCTION enter_as_member(_name text, _member text, _client bigint, _session integer)
RETURNS integer LANGUAGE plpgsql AS $$
DECLARE
    _cluster integer := enter_cluster(_name);
BEGIN
    PERFORM 1 FROM member m
        WHERE m.cluster = _cluster AND m.name = _member AND m.client = _client AND m.session = _session;
    RETURN CASE WHEN FOUND THEN _cluster END;
END
$$;

-- All of it, in columns; no row without a cluster.
CREATE OR REPLACE FUNCTION view_cluster(_cluster integer) RETURNS SETOF cluster_view LANGUAGE plpgsql AS $$
DECLARE
    _now double precision := clock(0);
BEGIN
    RETURN QUERY
        SELECT c.runner, c.backup, m.names, m.ages, m.fit, m.doing, m.places, s.indexes, s.holders, s.epochs
        FROM cluster c
        CROSS JOIN (
            SELECT array_agg(m.name) AS names, array_agg(greatest(_now - m.heard_at, 0)) AS ages,
                array_agg(m.fit) AS fit, array_agg(m.doing) AS doing, array_agg(m.place) AS places
            FROM member m WHERE m.cluster = _cluster
        ) m
        CROSS JOIN (
            SELECT array_agg(s.index ORDER BY s.index) AS indexes,
                array_agg(coalesce(s.holder, '') ORDER BY s.index) AS holders,
                array_agg(s.epoch ORDER BY s.index) AS epochs
            FROM slot s WHERE s.cluster = _cluster
        ) s
        WHERE c.id = _cluster;
END
$$;

-- False when another has this name. Whoever joins again, not knowing whether it had joined, parts with its old session.
CREATE OR REPLACE FUNCTION cluster_join(
    _name text, _member text, _client bigint, _session integer, _ttl double precision, _runner integer, _backup integer,
    _again boolean, _place text, _channel text
) RETURNS boolean LANGUAGE plpgsql AS $$
DECLARE
    _cluster integer;
BEGIN
    INSERT INTO cluster (name, channel, runner, backup) VALUES (_name, _channel, _runner, _backup)
        ON CONFLICT (name) DO NOTHING;
    _cluster := enter_cluster(_name);
    PERFORM part(_cluster, m.name, 'left') FROM member m
        WHERE m.cluster = _cluster AND m.client = _client AND m.session < _session;
    IF NOT EXISTS (SELECT FROM member m WHERE m.cluster = _cluster) THEN
        UPDATE cluster c SET runner = _runner, backup = _backup WHERE c.id = _cluster AND NOT _again;
    ELSIF EXISTS (SELECT FROM member m WHERE m.cluster = _cluster AND m.name = _member) THEN
        RETURN false;
    END IF;
    INSERT INTO member (cluster, name, client, session, heard_at, until, fit, doing, place)
        VALUES (_cluster, _member, _client, _session, clock(0), clock(0) + _ttl, true, '', _place);
    PERFORM tell(_cluster, 'joined', _member);
    RETURN true;
END
$$;

-- No row when the session was lost.
CREATE OR REPLACE FUNCTION cluster_beat(
    _name text, _member text, _client bigint, _session integer, _ttl double precision, _doing text, _fit boolean
) RETURNS SETOF cluster_view LANGUAGE plpgsql AS $$
DECLARE
    _cluster integer := enter_as_member(_name, _member, _client, _session);
BEGIN
    UPDATE member m SET heard_at = clock(0), until = clock(0) + _ttl, doing = _doing, fit = _fit
        WHERE m.cluster = _cluster AND m.name = _member;
    RETURN QUERY SELECT * FROM view_cluster(_cluster);
END
$$;

CREATE OR REPLACE FUNCTION cluster_look(_name text) RETURNS SETOF cluster_view LANGUAGE plpgsql AS $$
BEGIN
    RETURN QUERY SELECT * FROM view_cluster(enter_cluster(_name));
END
$$;

-- The epoch, null if the slot is not given, no row when the session was lost. Epochs are microseconds since 1970, or
-- follow the last one: so they grow also when what was known of a cluster is gone.
CREATE OR REPLACE FUNCTION cluster_take(_name text, _member text, _client bigint, _session integer, _index integer)
RETURNS TABLE (epoch bigint) LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    _cluster integer := enter_as_member(_name, _member, _client, _session);
    _own record;
    _former record;
    _epoch bigint;
BEGIN
    IF _cluster IS NULL THEN
        RETURN;
    END IF;
    SELECT s.index, s.epoch INTO _own FROM slot s WHERE s.cluster = _cluster AND s.holder = _member;
    SELECT s.holder, s.lost INTO _former FROM slot s WHERE s.cluster = _cluster AND s.index = _index;
    IF _own.index IS NOT NULL THEN
        _epoch := CASE _own.index WHEN _index THEN _own.epoch END;
    ELSIF _former.holder IS NULL THEN
        UPDATE cluster c SET epoch = greatest(c.epoch + 1, (clock(0) * 1e6)::bigint)
            WHERE c.id = _cluster AND _index >= 0 AND _index < c.runner
                AND c.runner > (  -- some may have still to retire
                    SELECT count(*) FROM slot s WHERE s.cluster = _cluster AND s.holder IS NOT NULL)
            RETURNING c.epoch INTO _epoch;
        IF FOUND THEN
            INSERT INTO slot (cluster, index, holder, epoch) VALUES (_cluster, _index, _member, _epoch)
                ON CONFLICT (cluster, index) DO UPDATE SET holder = _member, epoch = _epoch, lost = NULL;
            PERFORM tell(
                _cluster, CASE WHEN _former.lost IS NULL THEN 'elected' ELSE 'took over' END, _member, _index, _epoch,
                coalesce(_former.lost, ''));
        END IF;
    END IF;
    RETURN QUERY SELECT _epoch;
END
$$;

-- Only from this epoch: a call that comes late must not end what was won since.
CREATE OR REPLACE FUNCTION cluster_retire(_name text, _member text, _client bigint, _session integer, _epoch bigint)
RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    _cluster integer := enter_as_member(_name, _member, _client, _session);
    _slot record;
BEGIN
    UPDATE slot s SET holder = NULL WHERE s.cluster = _cluster AND s.holder = _member AND s.epoch = _epoch
        RETURNING s.index, s.epoch INTO _slot;
    IF FOUND THEN
        PERFORM tell(_cluster, 'retired', _member, _slot.index, _slot.epoch);
    END IF;
END
$$;

CREATE OR REPLACE FUNCTION cluster_leave(_name text, _member text, _client bigint, _session integer)
RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    _cluster integer := enter_as_member(_name, _member, _client, _session);
BEGIN
    IF _cluster IS NOT NULL THEN
        PERFORM part(_cluster, _member, 'left');
    END IF;
END
$$;

-- False when there is no such cluster.
CREATE OR REPLACE FUNCTION cluster_scale(_name text, _runner integer, _backup integer)
RETURNS boolean LANGUAGE plpgsql AS $$
DECLARE
    _cluster integer := enter_cluster(_name);
BEGIN
    UPDATE cluster c SET runner = _runner, backup = _backup WHERE c.id = _cluster;
    IF FOUND THEN
        PERFORM tell(_cluster, 'scaled', '', _detail => format('runner %s, backup %s', _runner, _backup));
    END IF;
    RETURN _cluster IS NOT NULL;
END
$$;

-- Newest first.
CREATE OR REPLACE FUNCTION cluster_events(_name text, _limit integer)
RETURNS TABLE (at double precision, what text, member text, slot integer, epoch bigint, detail text) LANGUAGE sql AS $$
    SELECT e.at, e.what, e.member, e.slot, e.epoch, e.detail FROM cluster_event e
    WHERE e.cluster = (SELECT c.id FROM cluster c WHERE c.name = _name) ORDER BY e.number DESC LIMIT _limit
$$;
