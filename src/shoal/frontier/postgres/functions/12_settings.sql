-- How the functions that clients call are run: on the tables beside them, whatever the caller's path is.
--
-- A batch is small and the tables are large, so whatever is looked up, is looked up in an index, batch by batch; and a
-- plan that was made while the tables were small must not read them whole when they have grown.
DO $$
DECLARE
    _function record;
    _schemas name[] := current_schemas(false);  -- that of these functions, that of the tables
BEGIN
    FOR _function IN
        SELECT p.oid::regprocedure AS name,
            p.proname = ANY(
                '{push, lease, renew, reissue, release, finish, upload, move_chunk, fence, claim, advance, relinquish,
                  read_items, host_states, delete_requests, delete_items, delete_lanes}') AS often
        FROM pg_proc p
        WHERE p.pronamespace = current_schema()::regnamespace AND p.proname = ANY(
            '{push, lease, renew, reissue, release, finish, upload, move_chunk, fence, retry_dead, update_host,
              host_states, set_options, remember, recall, claim, advance, relinquish, roles, read_items, trim_items,
              stats, audit, find, find_staged, search, history, dead_page, dead_kinds, surviving_receipts,
              record_rewind, rewinds, create_run, get_run, run_state, run_states, list_runs, set_state, begin_delete,
              delete_requests, delete_items, delete_lanes, end_delete, cluster_join, cluster_beat, cluster_look,
              cluster_take, cluster_retire, cluster_leave, cluster_scale, cluster_events}')
    LOOP
        EXECUTE format(
            'ALTER FUNCTION %s SET search_path = %I, %I, pg_temp', _function.name, _schemas[1], _schemas[2]);
        IF _function.often THEN
            EXECUTE format(
                'ALTER FUNCTION %s SET jit = off SET plan_cache_mode = force_generic_plan'
                ' SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off', _function.name);
        END IF;
    END LOOP;
END
$$;
