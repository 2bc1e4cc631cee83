//! Pure: start-up options of the controller.

use std::{
    net::{IpAddr, SocketAddr},
    num::NonZeroU16,
    path::PathBuf,
    time::Duration,
};

use common::replicas::ReplicaEndpoint;
use common::wire::{ActivatorEntry, StandbyOrder, is_dns_label, is_dns_subdomain};

use crate::model::{
    cluster_state::ControllerSettings,
    config_maps::port_ranges::parse_gateway_port,
    go_values::GoDuration,
    scale_policy::ScalePolicyConfig,
    standby_policy::{StandbyConfig, check_agent_timeout},
};

/// Start-up options of the controller, on any platform.
#[derive(Clone, Debug, clap::Args)]
pub struct ControllerConfig {
    /// Name of the node; a DNS label.
    #[arg(long = "controller-node", env = "ROUSE_NODE", default_value = "rouse")]
    pub node: String,
    /// Folder that holds `manifests/` and `objects/`.
    #[arg(
        long = "controller-state",
        env = "ROUSE_CONTROLLER_STATE",
        default_value = "/var/lib/rouse/rouse"
    )]
    pub state: PathBuf,
    /// Endpoint of routes and reports: `unix:/path`, `http://IP:PORT` or `https://IP:PORT`.
    #[arg(
        long = "controller-listen",
        env = "ROUSE_CONTROLLER_LISTEN",
        default_value = "unix:/run/rouse/rouse/controller.sock"
    )]
    pub listen: String,
    /// Address that serves health and metrics.
    #[arg(
        long = "controller-admin",
        env = "ROUSE_CONTROLLER_ADMIN",
        default_value = "127.0.0.1:7101"
    )]
    pub admin: SocketAddr,
    /// Domain of URLs from outside: `http://NAME.NAMESPACE.DOMAIN`.
    #[arg(long, env = "ROUSE_DOMAIN", default_value = "localhost")]
    pub domain: String,
    /// Addresses on which the activator listens for every service, at most one a family.
    #[arg(
        long = "activator-address",
        env = "ROUSE_ACTIVATOR_ADDRESSES",
        value_delimiter = ',',
        default_values = ["10.244.0.1", "fd00:10:244::1"]
    )]
    pub activators: Vec<IpAddr>,
    /// Gateway ports that the activator has open from the start; services may have no others. Local node only.
    #[arg(
        long = "controller-gateway-ports",
        env = "ROUSE_GATEWAY_PORTS",
        value_delimiter = ',',
        value_parser = parse_gateway_port
    )]
    pub gateway_ports: Vec<NonZeroU16>,
    /// Time without a sign of its agent after which a pod on standby is passed over, from 10 ms to 60 s; 250 ms by
    /// default. Local node only: on Kubernetes it is the key `standby-agent-timeout` of `config-autoscaler`, so the
    /// program of the controller has no such option.
    #[arg(skip = StandbyOrder::DEFAULT_AGENT_TIMEOUT)]
    pub standby_agent_timeout: Duration,
}

impl Default for ControllerConfig {
    fn default() -> Self {
        Self {
            node: "rouse".into(),
            state: "/var/lib/rouse/rouse".into(),
            listen: "unix:/run/rouse/rouse/controller.sock".into(),
            admin: SocketAddr::from(([127, 0, 0, 1], 7101)),
            domain: "localhost".into(),
            activators: vec![
                IpAddr::from([10, 244, 0, 1]),
                IpAddr::from([0xfd00, 0x10, 0x244, 0, 0, 0, 0, 1]),
            ],
            gateway_ports: Vec::new(),
            standby_agent_timeout: StandbyOrder::DEFAULT_AGENT_TIMEOUT,
        }
    }
}

/// Further start-up options of the controller on Kubernetes.
#[derive(Clone, Debug, clap::Args)]
pub struct KubernetesConfig {
    /// Uses the API server that FILE names; without it that of the pod's own cluster.
    #[arg(long, value_name = "FILE")]
    pub kubeconfig: Option<PathBuf>,
    /// Namespace of Rouse's own components and of the `config-*` ConfigMaps.
    #[arg(long, env = "SYSTEM_NAMESPACE", default_value = "knative-serving")]
    pub system_namespace: String,
    /// Name of the controller's own pod; identifies it in the lease.
    #[arg(long, env = "POD_NAME", default_value = "controller")]
    pub pod: String,
    /// Domain of names inside the cluster.
    #[arg(long, env = "CLUSTER_DOMAIN", default_value = "cluster.local")]
    pub cluster_domain: String,
    /// Address that serves admission webhooks; without one none are registered.
    #[arg(long, env = "ROUSE_CONTROLLER_WEBHOOK", default_value = "0.0.0.0:8443")]
    pub webhook: Option<SocketAddr>,
    /// URL by which the API server reaches the webhooks, such as `https://127.0.0.1:8443`, instead of the Service
    /// `webhook`: for an API server outside the cluster's network.
    #[arg(long, value_name = "URL", env = "ROUSE_CONTROLLER_WEBHOOK_URL")]
    pub webhook_url: Option<String>,
}

impl KubernetesConfig {
    /// Refuses values that cannot work, with the rule that is broken.
    pub fn validate(&self) -> Result<(), ControllerConfigError> {
        let bad = |name, value: &str, rule| {
            Err(ControllerConfigError { name, value: value.into(), rule })
        };
        if !is_dns_label(&self.system_namespace) {
            return bad("system-namespace", &self.system_namespace, "must be a DNS label");
        }
        if !is_dns_subdomain(&self.pod) {
            return bad("pod", &self.pod, "must be a pod's name");
        }
        if !is_dns_subdomain(&self.cluster_domain) {
            return bad("cluster-domain", &self.cluster_domain, "must be a domain name");
        }
        if let Some(url) = self.webhook_url.as_deref().filter(|it| !it.starts_with("https://")) {
            return bad("webhook-url", url, "must begin with https://");
        }
        Ok(())
    }
}

/// A start-up option with an unusable value.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{name} is {value:?}: {rule}")]
pub struct ControllerConfigError {
    name: &'static str,
    value: String,
    rule: &'static str,
}

impl ControllerConfig {
    /// Refuses values that cannot work, with the rule that is broken.
    pub fn validate(&self) -> Result<(), ControllerConfigError> {
        let bad = |name, value: &dyn std::fmt::Display, rule| {
            Err(ControllerConfigError { name, value: value.to_string(), rule })
        };
        if !is_dns_label(&self.node) {
            return bad("node", &self.node, "must be a DNS label");
        }
        if !is_dns_subdomain(&self.domain) {
            return bad("domain", &self.domain, "must be a domain name");
        }
        if !self.state.is_absolute() {
            return bad("state", &self.state.display(), "must be an absolute path");
        }
        if self.listen.parse::<ReplicaEndpoint>().is_err() {
            let rule = "must be unix:/path, http://IP:PORT or https://IP:PORT";
            return bad("listen", &self.listen, rule);
        }
        // The activator listens on one address of each family.
        let count = |is_of_family: fn(&IpAddr) -> bool| {
            self.activators.iter().filter(|it| is_of_family(it)).count()
        };
        if count(IpAddr::is_ipv4) > 1 || count(IpAddr::is_ipv6) > 1 {
            let all = format!("{:?}", self.activators);
            return bad("activator-address", &all, "must name at most one address a family");
        }
        let timeout = GoDuration::from(self.standby_agent_timeout);
        if check_agent_timeout(timeout).is_err() {
            return bad("standby-agent-timeout", &timeout, "must be from 10ms to 60s");
        }
        Ok(())
    }

    /// Returns true if routes and reports are served over mutual TLS. Only then may private keys be sent.
    pub fn serves_tls(&self) -> bool {
        self.listen.starts_with("https://")
    }

    /// Returns the settings that follow from the options. `boot_id` identifies this boot of the machine.
    pub fn to_settings(&self, boot_id: String) -> ControllerSettings {
        let activator = ActivatorEntry {
            name: self.node.clone(),
            node: self.node.clone(),
            zone: String::new(),
            addresses: self.activators.clone(),
            gets_all_reports: false,
        };
        let agent_timeout = self.standby_agent_timeout;
        let standby = StandbyConfig { agent_timeout, ..StandbyConfig::default() };
        ControllerSettings {
            external_domain: self.domain.clone(),
            node_name: self.node.clone(),
            boot_id,
            scale_policy: ScalePolicyConfig { standby, ..ScalePolicyConfig::default() },
            fixed_activators: vec![activator],
            opened_gateway_ports: Some(self.gateway_ports.iter().copied().collect()),
            ..ControllerSettings::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use common::{
        outbox::Outbox,
        wire::{ClientComponent, ComponentReplica, RouteTable},
    };

    use super::*;
    use crate::{
        decide::machine::{ControllerEvent, ControllerStateMachine},
        model::cluster_state::{ClusterState, UnixMillis},
        read::parse::{self, ManifestDocument},
    };

    /// Service that sleeps from the start, with one pod on standby.
    const SLEEPING: &str = r#"
apiVersion: serving.knative.dev/v1
kind: Service
metadata: {name: hello}
spec:
  template:
    metadata:
      annotations: {autoscaling.knative.dev/initial-scale: "0", rouse.dev/standby: "1"}
    spec: {containers: [{image: "dev.local/hello:v1"}]}
"#;

    /// Returns the RouteTable of a local node with these options and the service [`SLEEPING`].
    fn route_table(config: &ControllerConfig) -> RouteTable {
        let settings = Arc::new(config.to_settings(String::new()));
        let cluster = ClusterState { settings, uid_seed: 7, ..ClusterState::default() };
        let mut machine = ControllerStateMachine::new(cluster, Outbox::new());
        let role = ClientComponent::Agent;
        let reporter =
            ComponentReplica { role, name: config.node.clone(), node: config.node.clone() };
        let ManifestDocument::Service { name, manifest } =
            parse::manifest_documents(SLEEPING, &ScalePolicyConfig::default()).remove(0)
        else {
            panic!("refused")
        };
        for event in [
            ControllerEvent::ReportStreamBegin { reporter, stream: 1 },
            ControllerEvent::ManifestApplied { name, manifest },
        ] {
            machine.step(UnixMillis(1_000_000), event);
        }
        let mut cursor = machine.routes().subscribe();
        let first = cursor.try_next().expect("routes");
        let mut table = RouteTable::default();
        for (_, change) in machine.route_messages(first, &mut cursor).changes {
            table.apply_change(change.expect("a state"));
        }
        table
    }

    #[test]
    fn the_timeout_of_standby_is_in_the_orders_of_pods() {
        let timeouts = |config: &ControllerConfig| -> Vec<Option<Duration>> {
            let table = route_table(config);
            table.pods.values().map(|pod| pod.standby.map(|it| it.agent_timeout)).collect()
        };
        let config = ControllerConfig::default();
        assert_eq!(timeouts(&config), [Some(StandbyOrder::DEFAULT_AGENT_TIMEOUT)]);
        let standby_agent_timeout = Duration::from_secs(30);
        let config = ControllerConfig { standby_agent_timeout, ..config };
        assert_eq!(timeouts(&config), [Some(Duration::from_secs(30))]);
    }

    #[test]
    fn a_timeout_of_standby_out_of_its_bounds_is_refused() {
        let check = |standby_agent_timeout| {
            let config = ControllerConfig { standby_agent_timeout, ..ControllerConfig::default() };
            config.validate().map_err(|error| error.to_string())
        };
        assert_eq!(check(Duration::from_secs(60)), Ok(()));
        let refused = "standby-agent-timeout is \"5ms\": must be from 10ms to 60s";
        assert_eq!(check(Duration::from_millis(5)), Err(refused.to_owned()));
    }
}
