//! Pure: what the agent is told at start.

use std::{net::SocketAddr, path::PathBuf};

use common::replicas;

/// Settings of one agent. Printed once at start.
#[derive(Clone, Debug, PartialEq, Eq, clap::Parser)]
#[command(name = "rouse-agent", about = "Rouse's agent: one on each node", version)]
pub struct Config {
    /// Name of this node, as the RouteTable names it.
    #[arg(long, env = "ROUSE_NODE")]
    pub node: String,

    /// Where the controller serves routes and takes pod reports: `unix:/path`, `dns:NAME:PORT`, or `http://ip:port` or
    /// `https://ip:port`, several joined by commas.
    #[arg(long, env = "ROUSE_CONTROLLER")]
    pub controller: String,

    /// Where the autoscaler takes usage reports, likewise.
    #[arg(long, env = "ROUSE_AUTOSCALER")]
    pub autoscaler: String,

    /// Folder on a bpf filesystem; pins go to `v<ABI>/` below it.
    #[arg(long, env = "ROUSE_PINS", default_value = "/sys/fs/bpf/rouse")]
    pub pins: PathBuf,

    /// Cgroup (v2) of all whose connects may be redirected.
    #[arg(long, env = "ROUSE_CLIENTS_CGROUP", default_value = "/sys/fs/cgroup/kubepods.slice")]
    pub clients_cgroup: PathBuf,

    /// Cgroup (v2) below which the pods' own cgroups are; within or equal to the clients' cgroup.
    #[arg(long, env = "ROUSE_PODS_CGROUP", default_value = "/sys/fs/cgroup/kubepods.slice")]
    pub pods_cgroup: PathBuf,

    /// Folder in which the platform names a pod's network namespace by its uid before its first process runs; none:
    /// a namespace is found by the processes in it, while their runtime still sets them up.
    #[arg(long, env = "ROUSE_NAMESPACES")]
    pub namespaces: Option<PathBuf>,

    /// Network namespace of an activator on this node, in which one listener may then serve the ports of all services;
    /// none: the activator opens a socket a port.
    #[arg(long, env = "ROUSE_ACTIVATOR_NETNS")]
    pub activator_netns: Option<PathBuf>,

    /// Where /healthz, /readyz and /metrics are served.
    #[arg(long, env = "ROUSE_ADMIN", default_value = "127.0.0.1:7104")]
    pub admin: SocketAddr,
}

/// A setting makes no sense.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("--{name} is {value:?}: {rule}")]
pub struct Invalid {
    name: &'static str,
    value: String,
    rule: &'static str,
}

impl Config {
    /// Refuses settings that cannot work, with one line that says what would.
    pub fn validate(&self) -> Result<(), Invalid> {
        if !common::wire::is_subdomain(&self.node) {
            return Err(invalid(
                "node",
                &self.node,
                "must be a DNS name, as Kubernetes names nodes",
            ));
        }
        for (name, value) in [("controller", &self.controller), ("autoscaler", &self.autoscaler)] {
            if value.parse::<replicas::Setting>().is_err() {
                return Err(invalid(name, value, replicas::RULE));
            }
        }
        for (name, path) in [
            ("pins", &self.pins),
            ("clients-cgroup", &self.clients_cgroup),
            ("pods-cgroup", &self.pods_cgroup),
        ] {
            if !path.is_absolute() {
                return Err(invalid(name, &path.display().to_string(), "must be an absolute path"));
            }
        }
        if !self.pods_cgroup.starts_with(&self.clients_cgroup) {
            let value = self.pods_cgroup.display().to_string();
            return Err(invalid("pods-cgroup", &value, "must lie within the clients' cgroup"));
        }
        Ok(())
    }
}

fn invalid(name: &'static str, value: &str, rule: &'static str) -> Invalid {
    Invalid { name, value: value.to_owned(), rule }
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;

    fn parse(extra: &[&str]) -> Config {
        let fixed =
            ["agent", "--node=n1", "--controller=unix:/c", "--autoscaler=http://10.0.0.1:7"];
        Config::try_parse_from(fixed.iter().chain(extra)).expect("known flags")
    }

    #[test]
    fn defaults_are_those_of_a_kubernetes_node() {
        let config = parse(&[]);
        assert_eq!(config.validate(), Ok(()));
        assert_eq!(config.pods_cgroup, config.clients_cgroup);
        assert_eq!(config.admin.port(), 7104);
    }

    #[test]
    fn a_bad_setting_is_named_with_what_would_do() {
        let cases = [
            (Config { node: "N 1".into(), ..parse(&[]) }, "--node is \"N 1\""),
            (Config { controller: "tcp:1".into(), ..parse(&[]) }, "--controller is \"tcp:1\""),
            (parse(&["--pins=bpf"]), "--pins is \"bpf\""),
            (parse(&["--pods-cgroup=/elsewhere"]), "--pods-cgroup is \"/elsewhere\""),
        ];
        for (config, begins) in cases {
            let refused = config.validate().expect_err(begins).to_string();
            assert!(refused.starts_with(begins), "{refused}");
        }
    }
}
