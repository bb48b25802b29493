-- Documents.

CREATE FUNCTION documents(_first bytea, _after bytea, _before bytea, _limit integer)
RETURNS TABLE (key bytea, value bytea, version bytea) LANGUAGE plpgsql AS $$
BEGIN
    RETURN QUERY
        SELECT d.key, d.value, d.version FROM document d
        WHERE d.key >= _first AND d.key > _after AND d.key < _before ORDER BY d.key LIMIT _limit;
END
$$;

-- Write a document if its version is _replaces (empty: if there is none); delete it if _value is null. With _run_id, also
-- create that run unless it exists. False if the document has another version.
CREATE FUNCTION put_document(
    _key bytea, _value bytea, _replaces bytea, _version bytea,
    _run_id text, _spider text, _state text, _created_at double precision, _settings bytea, _project text,
    _ended_at double precision
) RETURNS boolean LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
DECLARE
    _stored bytea;
    _is_written boolean;
BEGIN
    SELECT d.version INTO _stored FROM document d WHERE d.key = _key FOR UPDATE;
    IF _stored = _version OR (_value IS NULL AND _stored IS NULL) THEN
        RETURN true;
    END IF;
    IF _value IS NULL THEN
        DELETE FROM document d WHERE d.key = _key AND d.version = _replaces;
    ELSIF _replaces = '' THEN
        INSERT INTO document (key, version, value) VALUES (_key, _version, _value) ON CONFLICT DO NOTHING;
    ELSE
        UPDATE document d SET version = _version, value = _value WHERE d.key = _key AND d.version = _replaces;
    END IF;
    GET DIAGNOSTICS _is_written = ROW_COUNT;
    IF NOT _is_written THEN
        RETURN false;
    END IF;
    IF _value IS NULL THEN
        DELETE FROM inventory i WHERE i.run = 0 AND i.kind = 'document' AND i.name = convert_from(_key, 'UTF8');
    ELSIF _replaces = '' THEN
        INSERT INTO inventory (run, kind, name) VALUES (0, 'document', convert_from(_key, 'UTF8')) ON CONFLICT DO NOTHING;
    END IF;
    IF _run_id IS NOT NULL THEN
        PERFORM create_run(_run_id, _spider, _state, _created_at, _settings, _project, _ended_at);
    END IF;
    RETURN true;
END
$$;

-- Write a document with cookies of a run. Returns the new version of the run's cookies, which each lease answers with; 0 if
-- the document has another version.
CREATE FUNCTION store_cookies(
    _run integer, _key bytea, _value bytea, _replaces bytea, _new bytea
) RETURNS bigint LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
DECLARE
    _version bigint;
BEGIN
    PERFORM check_run(_run);
    IF NOT put_document(_key, _value, _replaces, _new, NULL, NULL, NULL, NULL, NULL, NULL, NULL) THEN
        RETURN 0;
    END IF;
    INSERT INTO cookie_version AS v (run, version) VALUES (_run, 1)
        ON CONFLICT (run) DO UPDATE SET version = v.version + 1 RETURNING v.version INTO _version;
    RETURN _version;
END
$$;
