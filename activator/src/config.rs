//! Pure: what the activator is told at its start.

use std::{
    net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener},
    path::PathBuf,
    time::Duration,
};

use clap::Parser;

use crate::queue::Bounds;

/// Settings of one activator. Each has a flag and an environment variable.
#[derive(Debug, Parser)]
#[command(
    name = "activator",
    version,
    about = "Holds requests until a pod is ready, then forwards them"
)]
pub struct Config {
    /// Name of this activator, unique among activators.
    #[arg(long, env = "ROUSE_ACTIVATOR_NAME", default_value = "activator")]
    pub name: String,

    /// Node it runs on.
    #[arg(long, env = "ROUSE_NODE", default_value = "")]
    pub node: String,

    /// Where the controller serves routes: `unix:/path` or `http://host:port`.
    #[arg(long, env = "ROUSE_CONTROLLER", default_value = "unix:/run/rouse/rouse/controller.sock")]
    pub controller: String,

    /// Where the autoscaler takes usage: `unix:/path` or `http://host:port`.
    #[arg(long, env = "ROUSE_AUTOSCALER", default_value = "unix:/run/rouse/rouse/autoscaler.sock")]
    pub autoscaler: String,

    /// Addresses on which every service's own port is opened.
    #[arg(
        long,
        env = "ROUSE_ACTIVATOR_LISTEN",
        value_delimiter = ',',
        default_value = "10.244.0.1,fd00:10:244::1"
    )]
    pub listen: Vec<IpAddr>,

    /// The agent's pinned map of listeners: one listener then serves the ports of all services. Without it, and while it
    /// cannot be used, a socket is opened for each port.
    #[arg(long, env = "ROUSE_ACTIVATOR_PORTS_MAP")]
    pub ports_map: Option<PathBuf>,

    /// Address of the gateway for requests from outside, routed by Host; none: no gateway.
    #[arg(long, env = "ROUSE_ACTIVATOR_OUTSIDE")]
    pub outside: Option<SocketAddr>,

    /// The gateway's listener, bound already: it may live in another network namespace. Wins over `outside`.
    #[arg(skip)]
    pub outside_listener: Option<TcpListener>,

    /// Address of /healthz, /readyz and /metrics.
    #[arg(
        long,
        env = "ROUSE_ACTIVATOR_ADMIN",
        default_value_t = SocketAddr::from((Ipv4Addr::LOCALHOST, 7103))
    )]
    pub admin: SocketAddr,

    /// Requests that may wait for one revision, 1 to 1000000. Knative's QueueDepth.
    #[arg(long, env = "ROUSE_ACTIVATOR_MAX_WAITING", default_value_t = 10_000)]
    pub max_waiting: usize,

    /// Bytes that requests waiting for one revision may hold, 65536 or more.
    #[arg(long, env = "ROUSE_ACTIVATOR_MAX_WAITING_BYTES", default_value_t = 64 << 20)]
    pub max_waiting_bytes: usize,

    /// Bytes a request's head may have, 8192 to 1048576; beyond: 431.
    #[arg(long, env = "ROUSE_ACTIVATOR_MAX_HEAD_BYTES", default_value_t = 64 << 10)]
    pub max_head_bytes: usize,

    /// Milliseconds a client may take for a head, and a kept connection may lie idle. Knative's 60 000.
    #[arg(long, env = "ROUSE_ACTIVATOR_HEAD_TIMEOUT_MS", default_value_t = 60_000)]
    pub head_timeout_ms: u64,

    /// Listen backlog assumed of a pod, 2 to 65535. At most half of it is dialled before its first answer.
    #[arg(long, env = "ROUSE_ACTIVATOR_POD_BACKLOG", default_value_t = crate::pool::BACKLOG)]
    pub pod_backlog: u32,

    /// Milliseconds a connection to a pod is kept idle. Shorter than any common server's own bound (2 s in
    /// gunicorn, 5 s in Node.js), so that a pod does not close just when a request is sent.
    #[arg(long, env = "ROUSE_ACTIVATOR_POD_IDLE_MS", default_value_t = 1_000)]
    pub pod_idle_ms: u64,

    /// Milliseconds that requests in flight get to end once the activator is told to stop.
    #[arg(long, env = "ROUSE_ACTIVATOR_DRAIN_MS", default_value_t = 30_000)]
    pub drain_ms: u64,
}

/// A setting out of its range.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("setting {name} is {value}: {rule}")]
pub struct BadSetting {
    name: &'static str,
    value: String,
    rule: &'static str,
}

impl Config {
    /// The defaults, for tests and for a node that sets the rest itself. Reads no command line.
    pub fn defaults() -> Self {
        Self::parse_from(["activator"])
    }

    /// Checks every range.
    pub fn validate(&self) -> Result<(), BadSetting> {
        let within = |name, value: usize, low: usize, high: usize, rule| {
            let refused = || BadSetting { name, value: value.to_string(), rule };
            (low..=high).contains(&value).then_some(()).ok_or_else(refused)
        };
        if self.name.is_empty() {
            return Err(BadSetting {
                name: "--name",
                value: "empty".to_owned(),
                rule: "give each activator a name of its own",
            });
        }
        within("--max-waiting", self.max_waiting, 1, 1_000_000, "must be 1 to 1000000")?;
        let bytes = self.max_waiting_bytes;
        within("--max-waiting-bytes", bytes, 65_536, usize::MAX, "must be 65536 or more")?;
        within("--max-head-bytes", self.max_head_bytes, 8_192, 1 << 20, "must be 8192 to 1048576")?;
        let backlog = usize::try_from(self.pod_backlog).unwrap_or(usize::MAX);
        within("--pod-backlog", backlog, 2, 65_535, "must be 2 to 65535")
    }

    /// Bounds of each revision's line.
    pub fn bounds(&self) -> Bounds {
        Bounds { requests: self.max_waiting, bytes: self.max_waiting_bytes }
    }

    /// How long requests in flight get to end.
    pub fn drain(&self) -> Duration {
        Duration::from_millis(self.drain_ms)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_defaults_are_valid() {
        assert_eq!(Config::defaults().validate(), Ok(()));
    }

    #[test]
    fn a_bad_value_is_refused_with_its_name_and_range() {
        let config = Config { max_waiting: 0, ..Config::defaults() };
        let refused = config.validate().expect_err("out of range");
        assert_eq!(refused.to_string(), "setting --max-waiting is 0: must be 1 to 1000000");
    }
}
