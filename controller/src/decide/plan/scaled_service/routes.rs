//! Pure: a scaled Service and its pods → subjects of the RouteTable: one service for each TCP port.

use std::{net::IpAddr, num::NonZeroU16, sync::Arc};

use common::wire::{
    AllowedSources, AppProtocol, NamespacedName, RevisionEntry, RouteChange, RouteTarget,
    ServiceEntry,
};

use super::{
    super::{RevisionPlanContext, revision_conditions, routes},
    layout,
};
use crate::model::{
    cluster_state::{
        AppRevision, AppState, ClusterState, ParsedTemplate, UserService, UserServicePort,
        WorkloadBinding,
    },
    network_policies::PolicyPort,
};

/// Returns all subjects of a scaled Service; none while it scales no workload.
pub(super) fn route_subjects(
    app: &AppState,
    name: &NamespacedName,
    templates: &[Arc<ParsedTemplate>],
    cluster: &ClusterState,
) -> Vec<RouteChange> {
    let Some((scaled, binding, revision)) = app.scaled_revision() else { return Vec::new() };
    let (Some(service), Some(template)) = (&scaled.service, templates.first()) else {
        return Vec::new();
    };
    let context = RevisionPlanContext::without_time(cluster, &name.namespace, template);
    let mut out =
        vec![RouteChange::Revision(revision_subject(name, service, binding, revision, &context))];
    let pods = revision.pods.iter().filter_map(|it| routes::pod_subject(it, revision, &context));
    out.extend(pods.map(|it| RouteChange::Pod(it.into())));
    let targets = targets(name, revision, &context);
    let port_subject = |port: &UserServicePort| {
        Some(ServiceEntry {
            name: name.with_port(port.port),
            addresses: service.cluster_ips.to_vec(),
            // The ClusterIP has served before, so no condition waits until agents have its frontend.
            awaits_agents: false,
            port: port.port,
            activator_port: scaled.activator_port(port.port)?,
            targets: targets.clone(),
            connection_path: routes::connection_path(app, revision, port.protocol, &context),
            hosts: Vec::new(),
            gateway_rules: None,
            protocol: Some(port.protocol),
            uses_pod_ports: true,
            affinity: service.affinity,
            serves_local_tls: false,
        })
    };
    out.extend(service.ports.iter().filter_map(port_subject).map(RouteChange::Service));
    out
}

/// Returns the target of all ports; none if the pods crash again and again. Requests without a target get an error at
/// once.
fn targets(
    name: &NamespacedName,
    revision: &AppRevision,
    context: &RevisionPlanContext<'_>,
) -> Vec<RouteTarget> {
    match revision_conditions::should_fail_fast(revision, context) {
        true => Vec::new(),
        false => vec![RouteTarget { revision: name.clone(), percent: 100 }],
    }
}

fn revision_subject(
    name: &NamespacedName,
    service: &UserService,
    binding: &WorkloadBinding,
    revision: &AppRevision,
    context: &RevisionPlanContext<'_>,
) -> RevisionEntry {
    let is_tcp = layout::is_tcp_only(service);
    RevisionEntry {
        protocol: if is_tcp { AppProtocol::Tcp } else { AppProtocol::Http1 },
        allowed_sources: allowed_sources(name, service, binding, context.cluster),
        ..context.template.to_wire(name, revision)
    }
}

/// Returns the clients that may send requests to the pods: those that policies admit at all ports. An activator checks
/// clients by Revision, and a request that waits must not reach a port that refuses its client.
fn allowed_sources(
    name: &NamespacedName,
    service: &UserService,
    binding: &WorkloadBinding,
    cluster: &ClusterState,
) -> Option<Arc<AllowedSources>> {
    let policies = &cluster.network_policies;
    if !policies.has_policy_in(&name.namespace) {
        return None;
    }
    let ports = layout::named_ports(&binding.shape, service);
    let admitted = |(number, port_name): &(NonZeroU16, String)| {
        let port = PolicyPort { number: number.get(), name: port_name };
        policies.admitted_sources(&name.namespace, || binding.template_labels.to_btree_map(), port)
    };
    // A port that is open to all restricts nothing.
    let restricted: Vec<Arc<AllowedSources>> = ports.iter().filter_map(admitted).collect();
    common_sources(&restricted)
}

/// Returns the sources that all of these contain; `None` for an empty list. Of two different networks the common part
/// is left out, even if one contains the other.
fn common_sources(all: &[Arc<AllowedSources>]) -> Option<Arc<AllowedSources>> {
    let (first, others) = all.split_first()?;
    if others.iter().all(|it| it == first) {
        return Some(Arc::clone(first));
    }
    let is_common = |address: &IpAddr| all.iter().all(|it| it.contains(*address));
    let addresses = all.iter().flat_map(|it| it.addresses.iter().copied()).filter(is_common);
    let blocks = first.ip_blocks.iter();
    let blocks = blocks.filter(|block| others.iter().all(|it| it.ip_blocks.contains(*block)));
    Some(Arc::new(AllowedSources {
        addresses: addresses.collect(),
        ip_blocks: blocks.cloned().collect(),
    }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use common::wire::IpBlock;

    #[test]
    fn only_clients_that_are_admitted_at_each_port_may_wait() {
        let block = |network: &str| IpBlock {
            network: network.parse().expect("a network"),
            exceptions: Vec::new(),
        };
        let sources = |last_bytes: &[u8], networks: &[&str]| {
            Arc::new(AllowedSources {
                addresses: last_bytes.iter().map(|it| IpAddr::from([10, 0, 0, *it])).collect(),
                ip_blocks: networks.iter().map(|it| block(it)).collect(),
            })
        };
        assert_eq!(common_sources(&[]), None);
        let web = sources(&[1, 2, 3], &["10.1.0.0/16", "10.2.0.0/16"]);
        assert_eq!(common_sources(&[web.clone(), web.clone()]), Some(web.clone()));
        let sql = sources(&[2, 4], &["10.2.0.0/16", "10.0.0.3/32"]);
        assert_eq!(common_sources(&[web, sql]), Some(sources(&[2, 3], &["10.2.0.0/16"])));
    }
}
