-- Members of clusters and their slots. Each function that clients call, except cluster_events, starts with enter_cluster:
-- it locks the cluster and removes members whose session has ended.

-- Record an event, drop old ones, and notify the members. The caller has locked the cluster.
CREATE FUNCTION record_event(
    _cluster integer, _what text, _member text, _slot integer DEFAULT NULL, _epoch bigint DEFAULT NULL,
    _detail text DEFAULT ''
) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    _last record;
BEGIN
    UPDATE cluster c SET events = c.events + 1 WHERE c.id = _cluster RETURNING c.events, c.channel INTO _last;
    INSERT INTO cluster_event (cluster, number, at, what, member, slot, epoch, detail)
        VALUES (_cluster, _last.events, real_clock(0), _what, _member, _slot, coalesce(_epoch, 0), _detail);
    DELETE FROM cluster_event e WHERE e.cluster = _cluster AND e.number <= _last.events - 200;
    PERFORM pg_notify(_last.channel, '');
END
$$;

-- Remove a member that has left or is lost, and free its slot.
CREATE FUNCTION remove_member(_cluster integer, _member text, _what text) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    _slot record;
BEGIN
    DELETE FROM member m WHERE m.cluster = _cluster AND m.name = _member;
    UPDATE slot s SET holder = NULL, lost = CASE _what WHEN 'lost' THEN _member END
        WHERE s.cluster = _cluster AND s.holder = _member RETURNING s.index, s.epoch INTO _slot;
    PERFORM record_event(_cluster, _what, _member, _slot.index, _slot.epoch);
END
$$;

-- Lock a cluster and remove members whose session has ended. Returns its number; null if there is no such cluster.
CREATE FUNCTION enter_cluster(_name text) RETURNS integer LANGUAGE plpgsql AS $$
DECLARE
    _cluster integer;
    _now double precision;
BEGIN
    SELECT c.id INTO _cluster FROM cluster c WHERE c.name = _name FOR NO KEY UPDATE;
    _now := clock(0);
    PERFORM remove_member(_cluster, m.name, 'lost') FROM member m
        WHERE m.cluster = _cluster AND m.until <= _now ORDER BY m.until;
    RETURN _cluster;
END
$$;

-- The same for a member. Returns null if its session has ended.
CREATE FUNCTION enter_as_member(_name text, _member text, _client bigint, _session integer)
RETURNS integer LANGUAGE plpgsql AS $$
DECLARE
    _cluster integer := enter_cluster(_name);
BEGIN
    PERFORM 1 FROM member m
        WHERE m.cluster = _cluster AND m.name = _member AND m.client = _client AND m.session = _session;
    RETURN CASE WHEN FOUND THEN _cluster END;
END
$$;

-- A snapshot of the cluster; no row if there is no such cluster.
CREATE FUNCTION view_cluster(_cluster integer) RETURNS SETOF cluster_view LANGUAGE plpgsql AS $$
DECLARE
    _now double precision := clock(0);
BEGIN
    RETURN QUERY
        SELECT c.runner, c.backup, m.names, m.ages, m.fit, m.doing, m.places, s.indexes, s.holders, s.epochs
        FROM cluster c
        CROSS JOIN (
            SELECT array_agg(m.name) AS names, array_agg(greatest(_now - m.last_heartbeat, 0)) AS ages,
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

-- False if another member has this name. An earlier session of the same process ends: the process may not know about it.
CREATE FUNCTION cluster_join(
    _name text, _member text, _client bigint, _session integer, _ttl double precision, _runner integer, _backup integer,
    _again boolean, _place text, _channel text
) RETURNS boolean LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
DECLARE
    _cluster integer;
BEGIN
    INSERT INTO cluster (name, channel, runner, backup) VALUES (_name, _channel, _runner, _backup)
        ON CONFLICT (name) DO NOTHING;
    _cluster := enter_cluster(_name);
    PERFORM remove_member(_cluster, m.name, 'left') FROM member m
        WHERE m.cluster = _cluster AND m.client = _client AND m.session < _session;
    IF NOT EXISTS (SELECT FROM member m WHERE m.cluster = _cluster) THEN
        UPDATE cluster c SET runner = _runner, backup = _backup WHERE c.id = _cluster AND NOT _again;
    ELSIF EXISTS (SELECT FROM member m WHERE m.cluster = _cluster AND m.name = _member) THEN
        RETURN false;
    END IF;
    INSERT INTO member (cluster, name, client, session, last_heartbeat, until, fit, doing, place)
        VALUES (_cluster, _member, _client, _session, clock(0), clock(0) + _ttl, true, '', _place);
    PERFORM record_event(_cluster, 'joined', _member);
    RETURN true;
END
$$;

-- A heartbeat. No row if the session has ended.
CREATE FUNCTION cluster_beat(
    _name text, _member text, _client bigint, _session integer, _ttl double precision, _doing text, _fit boolean
) RETURNS SETOF cluster_view LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
DECLARE
    _cluster integer := enter_as_member(_name, _member, _client, _session);
BEGIN
    UPDATE member m SET last_heartbeat = clock(0), until = clock(0) + _ttl, doing = _doing, fit = _fit
        WHERE m.cluster = _cluster AND m.name = _member;
    RETURN QUERY SELECT * FROM view_cluster(_cluster);
END
$$;

CREATE FUNCTION cluster_observe(_name text) RETURNS SETOF cluster_view LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
BEGIN
    RETURN QUERY SELECT * FROM view_cluster(enter_cluster(_name));
END
$$;

-- Take a slot. Returns its epoch, null if it is not free, no row if the session has ended. Epochs are microseconds since
-- 1970, or the last one plus 1: so they grow even if the database lost the cluster.
CREATE FUNCTION cluster_take(_name text, _member text, _client bigint, _session integer, _index integer)
RETURNS TABLE (epoch bigint) LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
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
                AND c.runner > (  -- after a scale down, too many may hold slots
                    SELECT count(*) FROM slot s WHERE s.cluster = _cluster AND s.holder IS NOT NULL)
            RETURNING c.epoch INTO _epoch;
        IF FOUND THEN
            INSERT INTO slot (cluster, index, holder, epoch) VALUES (_cluster, _index, _member, _epoch)
                ON CONFLICT (cluster, index) DO UPDATE SET holder = _member, epoch = _epoch, lost = NULL;
            PERFORM record_event(
                _cluster, CASE WHEN _former.lost IS NULL THEN 'elected' ELSE 'took over' END, _member, _index, _epoch,
                coalesce(_former.lost, ''));
        END IF;
    END IF;
    RETURN QUERY SELECT _epoch;
END
$$;

-- Release a slot, only if it is still held under this epoch: a late call must not release a newer one.
CREATE FUNCTION cluster_retire(_name text, _member text, _client bigint, _session integer, _epoch bigint)
RETURNS void LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
DECLARE
    _cluster integer := enter_as_member(_name, _member, _client, _session);
    _slot record;
BEGIN
    UPDATE slot s SET holder = NULL WHERE s.cluster = _cluster AND s.holder = _member AND s.epoch = _epoch
        RETURNING s.index, s.epoch INTO _slot;
    IF FOUND THEN
        PERFORM record_event(_cluster, 'retired', _member, _slot.index, _slot.epoch);
    END IF;
END
$$;

CREATE FUNCTION cluster_leave(_name text, _member text, _client bigint, _session integer)
RETURNS void LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
DECLARE
    _cluster integer := enter_as_member(_name, _member, _client, _session);
BEGIN
    IF _cluster IS NOT NULL THEN
        PERFORM remove_member(_cluster, _member, 'left');
    END IF;
END
$$;

-- Change the wanted numbers. False if there is no such cluster.
CREATE FUNCTION cluster_scale(_name text, _runner integer, _backup integer)
RETURNS boolean LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
DECLARE
    _cluster integer := enter_cluster(_name);
BEGIN
    UPDATE cluster c SET runner = _runner, backup = _backup WHERE c.id = _cluster;
    IF FOUND THEN
        PERFORM record_event(_cluster, 'scaled', '', _detail => format('runner %s, backup %s', _runner, _backup));
    END IF;
    RETURN _cluster IS NOT NULL;
END
$$;

-- Newest first.
CREATE FUNCTION cluster_events(_name text, _limit integer)
RETURNS TABLE (at double precision, what text, member text, slot integer, epoch bigint, detail text)
LANGUAGE sql SET search_path FROM CURRENT AS $$
    SELECT e.at, e.what, e.member, e.slot, e.epoch, e.detail FROM cluster_event e
    WHERE e.cluster = (SELECT c.id FROM cluster c WHERE c.name = _name) ORDER BY e.number DESC LIMIT _limit
$$;
