//! Pure: settings that hold for all apps.

use std::{collections::BTreeMap, net::IpAddr};

use common::wire::{ActivatorEntry, NamespacedName};
use datapath::abi::ACTIVATOR_PORTS;

use super::ClusterIpSource;
use crate::model::{
    config_maps::{Configs, port_ranges::PortRanges},
    scale_policy::ScalePolicyConfig,
};

/// Settings that hold for all apps.
#[derive(Clone, Debug, PartialEq)]
pub struct ControllerSettings {
    /// Platform that makes objects and pods.
    pub platform: PlatformKind,
    /// Namespace of Rouse's own components.
    pub system_namespace: String,
    /// Name of this controller's own pod.
    pub own_pod_name: String,
    /// Settings of Deployments, chosen by operators.
    pub deployment: DeploymentSettings,
    /// Domain of external URLs: `http://NAME.NAMESPACE.DOMAIN`.
    pub external_domain: String,
    /// Domain of cluster-local names: `NAME.NAMESPACE.svc.CLUSTER_DOMAIN`.
    pub cluster_domain: String,
    /// True if this controller can sign certificates for names inside the cluster, and send them with their keys.
    pub signs_local_certificates: bool,
    /// Name of the local node.
    pub node_name: String,
    /// Identifier of this boot of the machine.
    pub boot_id: String,
    /// Checked settings of the ConfigMaps in force.
    pub config_maps: Configs,
    /// Checked settings of Knative's `config-autoscaler`.
    pub scale_policy: ScalePolicyConfig,
    /// First 16 bits of IPv4 ClusterIPs; the last 16 are allocated.
    pub cluster_ip_prefix_v4: [u8; 2],
    /// First 112 bits of IPv6 ClusterIPs; the last 16 are allocated.
    pub cluster_ip_prefix_v6: [u16; 7],
    /// First and last port for names at the activators.
    pub activator_port_range: (u16, u16),
    /// Activators of the local node.
    pub fixed_activators: Vec<ActivatorEntry>,
    /// Gateway ports that are open from the start, on the local node; services may have no others. `None`: activators
    /// open those that services have, and `config-network` has the permitted ones.
    pub opened_gateway_ports: Option<PortRanges>,
}

impl Default for ControllerSettings {
    fn default() -> Self {
        Self {
            platform: PlatformKind::Local,
            system_namespace: "knative-serving".into(),
            own_pod_name: String::new(),
            deployment: DeploymentSettings::default(),
            external_domain: "localhost".into(),
            cluster_domain: "cluster.local".into(),
            signs_local_certificates: false,
            node_name: "rouse".into(),
            boot_id: String::new(),
            config_maps: Configs::default(),
            scale_policy: ScalePolicyConfig::default(),
            cluster_ip_prefix_v4: [10, 96],
            cluster_ip_prefix_v6: [0xfd00, 0x10, 0x96, 0, 0, 0, 0],
            activator_port_range: ACTIVATOR_PORTS.into(),
            fixed_activators: Vec::new(),
            opened_gateway_ports: None,
        }
    }
}

impl ControllerSettings {
    /// Iterates over the Secrets with certificates for every host, in the order of their choice. They are in the system
    /// namespace.
    pub fn shared_certificates(&self) -> impl Iterator<Item = NamespacedName> {
        let names = self.config_maps.network.certificates.iter();
        names.map(move |it| NamespacedName::new(self.system_namespace.as_str(), it.as_str()))
    }

    /// Returns the ClusterIPs of a name, IPv4 first.
    pub fn cluster_ips(&self, source: &ClusterIpSource) -> Vec<IpAddr> {
        // Both families share the number, so one allocation reserves both addresses.
        let suffix = match source {
            ClusterIpSource::LocalRange(suffix) => *suffix,
            ClusterIpSource::ApiServer(addresses) => return addresses.to_vec(),
        };
        let ([a, b], [c, d]) = (self.cluster_ip_prefix_v4, suffix.to_be_bytes());
        let [s, t, u, v, w, x, y] = self.cluster_ip_prefix_v6;
        vec![IpAddr::from([a, b, c, d]), IpAddr::from([s, t, u, v, w, x, y, suffix])]
    }
}

/// Settings of operators for pods, from `config-deployment`, `config-defaults` and `config-features`.
#[derive(Clone, Debug, PartialEq)]
pub struct DeploymentSettings {
    /// Time within which a Deployment must make progress, in seconds (`progress-deadline`).
    pub progress_deadline_seconds: i32,
    /// True if pods of a Revision prefer different nodes (`default-affinity-type`).
    pub spread_over_nodes: bool,
    /// Runtime classes with the labels a pod must have for each (`runtime-class-name`).
    pub runtime_classes: BTreeMap<String, BTreeMap<String, String>>,
    /// `enableServiceLinks` of pods whose user does not set it (`enable-service-links`). `None` leaves it to
    /// Kubernetes.
    pub enable_service_links: Option<bool>,
    /// `automountServiceAccountToken` of pods without a service account of their own
    /// (`automount-service-account-token`).
    pub automount_service_account_token: Option<bool>,
    /// True if liveness probes may use another port than the serving one (`multi-container-probing`).
    pub probe_any_port: bool,
    /// True if pods get a preStop hook, so that they stop only once the agent reports nothing in flight.
    pub wait_for_drain: bool,
}

impl Default for DeploymentSettings {
    fn default() -> Self {
        Self {
            progress_deadline_seconds: 600,
            spread_over_nodes: true,
            runtime_classes: BTreeMap::new(),
            enable_service_links: Some(false),
            automount_service_account_token: None,
            probe_any_port: false,
            wait_for_drain: true,
        }
    }
}

/// Platform that makes objects and pods from plans.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PlatformKind {
    /// The controller itself, at once; a local node starts the pods.
    #[default]
    Local,
    /// The API server: a planned object exists once a watch reports it.
    Kubernetes,
}
