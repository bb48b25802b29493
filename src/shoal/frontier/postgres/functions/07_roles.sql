-- Who seeds and who drains, and the item log.

-- What is claimed is the slot's, if there is one.
CREATE OR REPLACE FUNCTION claim(
    _run integer, _offset double precision, _role text, _ttl double precision, _slot text DEFAULT NULL,
    _epoch bigint DEFAULT NULL
) RETURNS TABLE (token bigint, cursor bytea) LANGUAGE plpgsql AS $$
#variable_conflict use_column
BEGIN
    IF _slot IS NOT NULL THEN
        PERFORM check_fence(_run, _slot, _epoch);
    END IF;
    IF NOT EXISTS (SELECT FROM run r WHERE r.id = _run) THEN
        PERFORM no_run();
    END IF;
    RETURN QUERY
        INSERT INTO role AS r (run, role, token, until, cursor, finished, slot, epoch)
            VALUES (_run, _role, nextval('token'), clock(_offset) + _ttl, '', false, _slot, _epoch)
            ON CONFLICT (run, role) DO UPDATE SET token = excluded.token, until = clock(_offset) + _ttl,
                slot = excluded.slot, epoch = excluded.epoch
                WHERE NOT r.finished AND r.until <= clock(_offset)
            RETURNING r.token, r.cursor;
END
$$;

CREATE OR REPLACE FUNCTION advance(
    _run integer, _offset double precision, _role text, _token bigint, _cursor bytea, _ttl double precision
) RETURNS boolean LANGUAGE sql AS $$
    WITH kept AS (
        UPDATE role r SET cursor = _cursor, until = clock(_offset) + _ttl
            WHERE r.run = _run AND r.role = _role AND r.token = _token RETURNING 1
    )
    SELECT EXISTS (SELECT FROM kept)
$$;

CREATE OR REPLACE FUNCTION relinquish(_run integer, _role text, _token bigint, _finished boolean)
RETURNS boolean LANGUAGE sql AS $$
    WITH given AS (
        UPDATE role r SET token = 0, until = 0, finished = _finished
            WHERE r.run = _run AND r.role = _role AND r.token = _token RETURNING 1
    )
    SELECT EXISTS (SELECT FROM given)
$$;

CREATE OR REPLACE FUNCTION roles(_run integer, _offset double precision)
RETURNS TABLE (role text, cursor bytea, held boolean, finished boolean) LANGUAGE sql AS $$
    SELECT r.role, r.cursor, r.token > 0 AND r.until > clock(_offset), r.finished FROM role r
    WHERE r.run = _run ORDER BY r.role
$$;

CREATE OR REPLACE FUNCTION read_items(_run integer, _after bigint, _limit integer)
RETURNS TABLE (seq bigint, fingerprint bytea, "position" integer, payload bytea) LANGUAGE sql AS $$
    SELECT i.seq, i.fingerprint, i.position, i.payload FROM item i
    WHERE i.run = _run AND i.seq > _after ORDER BY i.seq LIMIT _limit
$$;

CREATE OR REPLACE FUNCTION trim_items(_run integer, _through bigint) RETURNS void LANGUAGE sql AS $$
    DELETE FROM item i WHERE i.run = _run AND i.seq <= _through
$$;
