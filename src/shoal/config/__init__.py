"""All settings of Shoal: typed, checked and frozen.

``Config`` is the whole tree. Each part of the system receives only its own section, such as ``HttpSettings``. Every
value is checked, whether you write it by hand (``HttpSettings(proxy=...)``), change it with ``with_settings``, or
load it from files, environment and command line with ``load_config``. A bad value raises a ``ConfigError`` that names
its key. Durations are in seconds. Passwords never appear in a ``repr`` or a message, and ``flatten`` masks them.

This room may import only `errors` and `messages`. Start with `settings`: it has all of them.
"""

from __future__ import annotations

from shoal.config.checks import check_proxy as check_proxy
from shoal.config.checks import find_short_tokens as find_short_tokens
from shoal.config.checks import mask as mask
from shoal.config.layers import check_trust as check_trust
from shoal.config.layers import flatten as flatten
from shoal.config.layers import read_toml as read_toml
from shoal.config.loading import Resolved as Resolved
from shoal.config.loading import config_for as config_for
from shoal.config.loading import env_name as env_name
from shoal.config.loading import find_config_file as find_config_file
from shoal.config.loading import load_config as load_config
from shoal.config.settings import BrowserSettings as BrowserSettings
from shoal.config.settings import CacheSettings as CacheSettings
from shoal.config.settings import Config as Config
from shoal.config.settings import Count as Count
from shoal.config.settings import DnsSettings as DnsSettings
from shoal.config.settings import FileSettings as FileSettings
from shoal.config.settings import HttpSettings as HttpSettings
from shoal.config.settings import IdentitySettings as IdentitySettings
from shoal.config.settings import ImageSettings as ImageSettings
from shoal.config.settings import LoginSettings as LoginSettings
from shoal.config.settings import NewRunPolicy as NewRunPolicy
from shoal.config.settings import OutcomeSettings as OutcomeSettings
from shoal.config.settings import QueueSettings as QueueSettings
from shoal.config.settings import RetrySettings as RetrySettings
from shoal.config.settings import RobotsSettings as RobotsSettings
from shoal.config.settings import ScopeSettings as ScopeSettings
from shoal.config.settings import Seconds as Seconds
from shoal.config.settings import ServerSettings as ServerSettings
from shoal.config.settings import Text as Text
from shoal.config.settings import ThrottleSettings as ThrottleSettings
from shoal.config.settings import Timeout as Timeout
from shoal.config.settings import TorSettings as TorSettings
from shoal.config.settings import WarcSettings as WarcSettings
from shoal.config.settings import Weight as Weight
from shoal.config.settings import WorkerSettings as WorkerSettings
