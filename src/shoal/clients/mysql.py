"""The errors of MySQL and MariaDB. Needs PyMySQL."""

from __future__ import annotations

import pymysql
from pymysql.constants import CR, ER

from shoal.clients.errors import Severity

CONFLICTS = frozenset(
    {ER.LOCK_DEADLOCK, ER.CHECKREAD, ER.NO_SUCH_TABLE, ER.BAD_FIELD_ERROR, ER.DUP_FIELDNAME, ER.TABLE_EXISTS_ERROR,
     ER.TABLE_DEF_CHANGED}
)  # fmt: skip
"""Another process interfered."""
DISK_FULL = frozenset({3, ER.DISK_FULL, ER.RECORD_FILE_FULL})
READ_ONLY = frozenset({ER.OPTION_PREVENTS_STATEMENT, 1792, 1836, 1874})
"""Set by ``read_only``, a read-only transaction, ``super_read_only``, ``innodb_read_only``."""
CONNECTION_LOST = frozenset({CR.CR_SERVER_GONE_ERROR, CR.CR_SERVER_LOST, ER.SERVER_SHUTDOWN, 0})
DENIED = frozenset(
    {ER.ACCESS_DENIED_ERROR, ER.DBACCESS_DENIED_ERROR, ER.TABLEACCESS_DENIED_ERROR, ER.COLUMNACCESS_DENIED_ERROR,
     ER.SPECIFIC_ACCESS_DENIED_ERROR, ER.HOST_NOT_PRIVILEGED}
)  # fmt: skip

_AWAY = frozenset({
    *DISK_FULL, *READ_ONLY, *CONNECTION_LOST, *CONFLICTS,
    CR.CR_CONNECTION_ERROR, CR.CR_CONN_HOST_ERROR, CR.CR_UNKNOWN_HOST, CR.CR_SERVER_HANDSHAKE_ERR,
    CR.CR_SERVER_LOST_EXTENDED,
    ER.CON_COUNT_ERROR, ER.TOO_MANY_USER_CONNECTIONS, ER.USER_LIMIT_REACHED, ER.CANT_CREATE_THREAD,
    ER.BAD_HOST_ERROR, ER.HANDSHAKE_ERROR,
    ER.HOST_IS_BLOCKED,  # after many failed connections, until an administrator flushes the hosts
    ER.UNKNOWN_COM_ERROR,  # Galera: the node has no majority, or is being synchronized
    ER.FORCING_CLOSE, ER.ABORTING_CONNECTION, ER.NEW_ABORTING_CONNECTION,
    ER.NET_READ_ERROR, ER.NET_READ_INTERRUPTED, ER.NET_ERROR_ON_WRITE, ER.NET_WRITE_INTERRUPTED,
    ER.QUERY_INTERRUPTED, 1927, 3169, 4031,  # killed, also for being idle
    1969, 3024,  # a limit for the time of a statement: MariaDB, MySQL
    ER.LOCK_WAIT_TIMEOUT, ER.LOCK_TABLE_FULL, ER.CANT_LOCK, ER.CANT_UPDATE_WITH_READLOCK, 3572,
    ER.OUTOFMEMORY, ER.OUT_OF_RESOURCES, ER.OUT_OF_SORTMEMORY, 3170,
    ER.ERROR_ON_WRITE, ER.GET_ERRNO, ER.ERROR_DURING_COMMIT, 3101, ER.GET_TEMPORARY_ERRMSG,
})  # fmt: skip
"""Error numbers. PyMySQL does not keep the SQLSTATE. Numbers without a name are not in PyMySQL."""
_FINAL = frozenset({
    *DENIED, ER.CANT_CREATE_TABLE, ER.BAD_DB_ERROR, ER.NO_DB_ERROR, 1820, 1862, 3118,
    ER.TOO_MANY_FIELDS, ER.TOO_BIG_ROWSIZE, ER.TOO_LONG_KEY, ER.TOO_LONG_IDENT, ER.TOO_BIG_FIELDLENGTH,
    ER.WRONG_FIELD_SPEC, ER.INVALID_DEFAULT, ER.BLOB_USED_AS_KEY, ER.KEY_COLUMN_DOES_NOT_EXITS, ER.BAD_TABLE_ERROR,
    ER.UNKNOWN_CHARACTER_SET, ER.UNKNOWN_COLLATION, ER.CANT_AGGREGATE_2COLLATIONS,
    ER.TRUNCATED_WRONG_VALUE, ER.NO_DEFAULT_FOR_FIELD, ER.WRONG_VALUE_COUNT_ON_ROW, ER.NET_PACKET_TOO_LARGE,
    4025, 3819,  # constraints that another program added: MariaDB, MySQL
    1644, 1643,  # SIGNAL of a trigger
    ER.NOT_KEYFILE, ER.OLD_KEYFILE, ER.NOT_FORM_FILE, ER.CRASHED_ON_USAGE, ER.CRASHED_ON_REPAIR,  # damaged tables
    CR.CR_VERSION_ERROR, CR.CR_SSL_CONNECTION_ERROR, CR.CR_AUTH_PLUGIN_CANNOT_LOAD, CR.CR_AUTH_PLUGIN_ERR,
    CR.CR_SECURE_AUTH, CR.CR_CONN_UNKNOW_PROTOCOL,
})  # fmt: skip
_FINAL_KINDS = (pymysql.ProgrammingError, pymysql.DataError, pymysql.IntegrityError, pymysql.NotSupportedError)
"""Kinds of errors that PyMySQL makes of statements and values that the server refuses."""


def code_of(exc: Exception) -> int | None:
    """The number of an error."""
    return exc.args[0] if isinstance(exc, pymysql.MySQLError) and exc.args else None


def severity(exc: Exception) -> Severity:
    """What an error means."""
    code = code_of(exc)
    if isinstance(exc, OSError) or code in _AWAY:
        return Severity.AWAY
    return Severity.FINAL if code in _FINAL or isinstance(exc, _FINAL_KINDS) else Severity.UNCERTAIN
