-- Roles and the item log.

-- Claim a role, under a slot if there is one. A call with the token that holds the role is a repeat and succeeds. The epoch
-- of the claim is the time in microseconds, but larger than that of the last claim, and than _above.
CREATE FUNCTION claim(
    _run integer, _offset double precision, _role text, _token bigint, _ttl double precision, _above bigint,
    _slot text, _epoch bigint
) RETURNS TABLE (cursor bytea, claim_epoch bigint) LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    _now double precision;
BEGIN
    IF _slot IS NOT NULL THEN
        PERFORM lock_run(_run);               -- so that nobody fences the slot until the commit
        PERFORM check_fence(_run, _slot, _epoch);
    END IF;
    PERFORM hold_run(_run);
    _now := clock(_offset);
    RETURN QUERY
        INSERT INTO role AS r (run, role, token, until, cursor, finished, slot, epoch, claim_epoch)
            VALUES (_run, _role, _token, _now + _ttl, '', false, _slot, _epoch,
                greatest((_now * 1e6)::bigint, _above + 1))
            ON CONFLICT (run, role) DO UPDATE SET token = excluded.token, until = clock(_offset) + _ttl,
                slot = excluded.slot, epoch = excluded.epoch,
                claim_epoch = CASE WHEN r.token = excluded.token THEN r.claim_epoch
                    ELSE greatest(excluded.claim_epoch, r.claim_epoch + 1) END
                WHERE NOT r.finished AND (r.until <= clock(_offset) OR r.token = excluded.token)
            RETURNING r.cursor, r.claim_epoch;
    IF FOUND THEN
        INSERT INTO inventory (run, kind, name) VALUES (_run, 'role', _role) ON CONFLICT DO NOTHING;
    END IF;
END
$$;

-- Remove a role. False if it is held, or there is none.
CREATE FUNCTION forget_role(_run integer, _offset double precision, _role text) RETURNS boolean LANGUAGE plpgsql AS $$
BEGIN
    PERFORM check_run(_run);
    DELETE FROM role r WHERE r.run = _run AND r.role = _role AND r.until <= clock(_offset);
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    DELETE FROM inventory i WHERE i.run = _run AND i.kind = 'role' AND i.name = _role;
    RETURN true;
END
$$;

-- REWOUND if the item log ends before the item _seq, or has another item there than the client has read. _item_token 0: it
-- has read none. A trimmed item is not checked.
CREATE FUNCTION check_item(_run integer, _seq bigint, _item_token bigint, _fingerprint bytea, _position integer)
RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    _found record;
    _last bigint;
BEGIN
    IF _item_token <> 0 THEN
        SELECT i.token, i.fingerprint, i.position INTO _found FROM item i WHERE i.run = _run AND i.seq = _seq;
        SELECT g.items INTO _last FROM ledger g WHERE g.run = _run;
        IF _last < _seq
            OR (_found.token, _found.fingerprint, _found.position) <> (_item_token, _fingerprint, _position) THEN
            PERFORM refuse({REWOUND}, 'the item log has changed');
        END IF;
    END IF;
END
$$;

-- Move the cursor of a role. The item is the last one before the new cursor.
CREATE FUNCTION advance(
    _run integer, _offset double precision, _role text, _token bigint, _known bytea, _cursor bytea,
    _ttl double precision, _seq bigint, _item_token bigint, _fingerprint bytea, _position integer
) RETURNS boolean LANGUAGE plpgsql AS $$
BEGIN
    IF NOT lock_role(_run, _role, _token, _known, _cursor) THEN
        RETURN false;
    END IF;
    PERFORM check_item(_run, _seq, _item_token, _fingerprint, _position);
    UPDATE role r SET cursor = _cursor, until = clock(_offset) + _ttl WHERE r.run = _run AND r.role = _role;
    RETURN true;
END
$$;

-- Release a role, for good if _finished: then its cursor must be the one that the client knows.
CREATE FUNCTION relinquish(_run integer, _role text, _token bigint, _known bytea, _finished boolean)
RETURNS boolean LANGUAGE plpgsql AS $$
BEGIN
    IF _finished AND NOT lock_role(_run, _role, _token, _known, _known) THEN
        RETURN false;
    END IF;
    UPDATE role r SET token = 0, until = 0, finished = _finished
        WHERE r.run = _run AND r.role = _role AND r.token = _token;
    RETURN FOUND;
END
$$;

CREATE FUNCTION roles(_run integer, _offset double precision)
RETURNS TABLE (role text, cursor bytea, held boolean, finished boolean, holder text) LANGUAGE plpgsql AS $$
BEGIN
    RETURN QUERY
        SELECT r.role, r.cursor, r.token > 0 AND r.until > clock(_offset), r.finished, coalesce(r.slot, '') FROM role r
        WHERE r.run = _run ORDER BY r.role;
END
$$;

-- Read items, after a check of the last item that the client has read. With a maximum of bytes: those that fit, but at
-- least one. The lengths of values that are stored outside of their row are known without reading them.
CREATE FUNCTION read_items(
    _run integer, _after bigint, _limit integer, _seq bigint, _item_token bigint, _fingerprint bytea, _position integer,
    _max_bytes bigint
) RETURNS TABLE (seq bigint, fingerprint bytea, "position" integer, payload bytea, token bigint) LANGUAGE plpgsql AS $$
#variable_conflict use_column
BEGIN
    PERFORM check_item(_run, _seq, _item_token, _fingerprint, _position);
    IF _max_bytes IS NOT NULL THEN
        _limit := (
            SELECT greatest(count(*) FILTER (WHERE s.total <= _max_bytes), least(count(*), 1)) FROM (
                SELECT sum(octet_length(i.payload)) OVER (ORDER BY i.seq) AS total FROM item i
                WHERE i.run = _run AND i.seq > _after ORDER BY i.seq LIMIT _limit) s);
    END IF;
    RETURN QUERY
        SELECT i.seq, i.fingerprint, i.position, i.payload, i.token FROM item i
        WHERE i.run = _run AND i.seq > _after ORDER BY i.seq LIMIT _limit;
END
$$;

-- Delete items, only if the roles have these cursors: else the client's view is outdated.
CREATE FUNCTION trim_items(_run integer, _through bigint, _roles text[], _cursors bytea[])
RETURNS void LANGUAGE sql SET search_path FROM CURRENT AS $$
    WITH gone AS (
        DELETE FROM item i WHERE i.run = _run AND i.seq <= _through AND NOT EXISTS (
            SELECT FROM unnest(_roles, _cursors) u(role, cursor)
            LEFT JOIN role r ON r.run = _run AND r.role = u.role
            WHERE r.cursor IS DISTINCT FROM u.cursor)
            RETURNING 1
    )
    UPDATE ledger g SET trimmed = g.trimmed + (SELECT count(*) FROM gone)
        WHERE g.run = _run AND (SELECT count(*) FROM gone) > 0
$$;
