-- Settings of the functions that clients call often. Their batches are small and the tables are large, so every lookup must
-- use an index. A plan that was made while a table was small must not read all of it when it has grown. Without bitmap scans,
-- UPDATE and DELETE with = ANY(keys) lock their rows in the order of the index.
DO $$
DECLARE
    _function text;
BEGIN
    FOR _function IN
        SELECT p.oid::regprocedure FROM pg_proc p
        WHERE p.pronamespace = current_schema()::regnamespace AND p.proname = ANY(
            '{push, lease, renew, reissue, release, finish, upload, move_chunk, fence, fence_silent, beat, workers, claim, advance,
              forget_role, relinquish, read_items, roles, host_states, host_state, recall, stats, find_run, run_state, documents,
              delete_requests, delete_items, delete_lanes}')
    LOOP
        EXECUTE format(
            'ALTER FUNCTION %s SET search_path FROM CURRENT SET jit = off SET plan_cache_mode = force_generic_plan'
            ' SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off',
            _function);
    END LOOP;
END
$$;
