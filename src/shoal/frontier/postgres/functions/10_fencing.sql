-- Fences: slots of clusters get nothing more under earlier epochs.

-- FENCED if the slot was fenced with a later epoch.
CREATE FUNCTION check_fence(_run integer, _slot text, _epoch bigint) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    _latest bigint;
BEGIN
    SELECT f.epoch INTO _latest FROM fence f WHERE f.run = _run AND f.slot = _slot;
    IF _latest > _epoch THEN
        PERFORM refuse({FENCED}, format(
            'slot %s is now held under epoch %s; epoch %s gets nothing more', _slot, _latest, _epoch));
    END IF;
END
$$;

-- Revoke leases and roles of a slot under earlier epochs. Returns how many leases; they are lost as if expired.
CREATE FUNCTION fence(_run integer, _offset double precision, _slot text, _epoch bigint)
RETURNS integer LANGUAGE plpgsql AS $$
DECLARE
    _lost record;
BEGIN
    PERFORM lock_run(_run);                   -- before all other locks; nobody leases until the commit
    PERFORM check_fence(_run, _slot, _epoch);
    PERFORM check_run(_run);
    INSERT INTO fence AS f (run, slot, epoch) VALUES (_run, _slot, _epoch)
        ON CONFLICT (run, slot) DO UPDATE SET epoch = excluded.epoch WHERE f.epoch < excluded.epoch;
    DELETE FROM worker w WHERE w.run = _run AND w.name = _slot AND w.epoch < _epoch;
    UPDATE role r SET token = 0, until = 0 WHERE r.run = _run AND r.slot = _slot AND r.epoch < _epoch AND r.token > 0;
    SELECT array_agg(o.token) AS tokens, array_agg(DISTINCT o.host) AS hosts, array_agg(DISTINCT o.lane) AS lanes
        INTO _lost
        FROM (
            SELECT h.token, h.host, h.lane FROM held h
            WHERE h.run = _run AND h.slot = _slot AND h.state = {LEASED} AND h.epoch < _epoch ORDER BY h.token FOR UPDATE
        ) o;
    IF _lost.tokens IS NULL THEN
        RETURN 0;
    END IF;
    PERFORM end_leases(_lost.tokens, _lost.hosts, _lost.lanes, false, true, _offset);
    RETURN cardinality(_lost.tokens);
END
$$;
