use std::time::Duration;

use bytes::{Buf as _, Bytes};
use common::{
    fixtures,
    link::{ComponentLink, PodReportKey},
    local_node::LocalNodeSpec,
    outbox::Outbox,
    wire::{
        self, CertificateEntry, CertificateMaterial, ClientCaEntry, ClientCaMaterial,
        ConnectionPath, NamespacedName, PodObservation, PrivateKeyBytes, RouteChange, RouteItem,
        RouteKey, RoutingPhase, ScaleDecision,
    },
};
use futures::StreamExt as _;
use prost::Message as _;
use serde_json::json;
use tokio::sync::watch;

use super::{
    route_stream::{RouteStreamSource as _, encode_batch},
    subscribers::limit_to_role,
    *,
};
use crate::{
    decide::machine::{ControllerStateMachine, RouteMessageBatch},
    model::{cluster_state::ClusterState, object::ResourceKind, scale_policy::ScalePolicyConfig},
    read::parse::{self, ManifestDocument},
    shell::runtime::route_subscription::{RouteTableSubscription, RouteTableUpdate},
};

/// Starts a broadcast, which runs until the end of the test.
fn run_broadcast(shared: &Arc<ControllerRuntime>) -> Arc<RouteBroadcast> {
    let broadcast = Arc::new(RouteBroadcast::new(Arc::clone(shared), Duration::ZERO));
    let running = Arc::clone(&broadcast);
    tokio::spawn(async move { running.run().await });
    broadcast
}

const HELLO: &str = r#"
apiVersion: serving.knative.dev/v1
kind: Service
metadata: {name: hello}
spec:
  template:
    metadata: {annotations: {autoscaling.knative.dev/initial-scale: "0"}}
    spec: {containers: [{image: "hello:v1"}]}
"#;

/// Builds a controller that knows one Service, `default/hello`.
fn hello_controller() -> (Arc<ControllerRuntime>, watch::Receiver<LocalNodeSpec>) {
    let (node_spec, node_spec_rx) = watch::channel(LocalNodeSpec::default());
    let shared = Arc::new(ControllerRuntime::new(
        ControllerStateMachine::new(ClusterState::default(), Outbox::new()),
        node_spec,
    ));
    shared.release_node_spec();
    let ManifestDocument::Service { name, manifest } =
        parse::manifest_documents(HELLO, &ScalePolicyConfig::default()).remove(0)
    else {
        panic!("refused")
    };
    shared.step(ControllerEvent::ManifestApplied { name, manifest });
    (shared, node_spec_rx)
}

fn socket_endpoint(folder: &tempfile::TempDir) -> String {
    format!("unix:{}/socket", folder.path().display())
}

fn new_link(
    endpoint: &str,
    role: ClientComponent,
    shutdown: &CancellationToken,
) -> Arc<ComponentLink> {
    let subscriber = ComponentReplica { role, name: "n1".into(), node: "n1".into() };
    Arc::new(ComponentLink::new(endpoint, subscriber, shutdown.clone()))
}

/// Watches the routes over `link`; the receiver gets the whole RouteTable after each batch.
fn watch_route_table(link: Arc<ComponentLink>) -> watch::Receiver<common::wire::RouteView> {
    let (sender, receiver) = watch::channel(common::wire::RouteView::default());
    tokio::spawn(async move {
        link.watch_routes(|view, _| drop(sender.send_replace(view.clone()))).await;
    });
    receiver
}

async fn wait_until<T: Clone>(
    receiver: &mut watch::Receiver<T>,
    holds: impl FnMut(&T) -> bool,
) -> T {
    let value = tokio::time::timeout(Duration::from_secs(10), receiver.wait_for(holds));
    value.await.expect("in time").expect("the sender exists").clone()
}

fn hello_decision(requested_scale: u32) -> ScaleDecision {
    ScaleDecision {
        revision: NamespacedName::new("default", "hello-00001"),
        requested_scale: Some(requested_scale),
        connection_path: ConnectionPath::Direct,
        activator_count: 0,
        activity: common::wire::RevisionActivity::Active,
        stable_load: 0.0,
        panic_load: 0.0,
        target_load: 1.0,
        ready_pods: 0,
        is_panicking: false,
        excess_burst_capacity: 0.0,
        reason: String::new(),
        inputs: None,
        wake_origin: None,
    }
}

fn ready_pod_report(uid: &str) -> PodReportItem {
    PodReportItem::Observed(PodObservation {
        uid: uid.into(),
        address: Some(([10, 244, 0, 9], 8080).into()),
        other_family_address: None,
        listening: true,
        ready: true,
        drained: false,
        in_flight: 0,
        listening_since_ns: 1,
        not_ready_reason: String::new(),
        counts_all_ports: true,
        standby: None,
        awaits_stop: false,
    })
}

#[tokio::test]
async fn a_decision_over_the_wire_becomes_an_order_and_a_report_becomes_a_route() {
    let folder = tempfile::tempdir().expect("a folder");
    let (endpoint, shutdown) = (socket_endpoint(&folder), CancellationToken::new());
    let (shared, mut node_spec_rx) = hello_controller();
    let (server, at, stop) = (Arc::clone(&shared), endpoint.clone(), shutdown.clone());
    let server = tokio::spawn(async move { serve(server, &at, stop).await });

    let agent = new_link(&endpoint, ClientComponent::Agent, &shutdown);
    let mut table = watch_route_table(Arc::clone(&agent));
    let view = wait_until(&mut table, |view| {
        view.table.services.contains_key(&NamespacedName::new("default", "hello"))
    })
    .await;
    assert!(view.table.revisions.values().all(|it| it.policy.is_none()));
    let autoscaler = new_link(&endpoint, ClientComponent::Autoscaler, &shutdown);
    let mut policies = watch_route_table(Arc::clone(&autoscaler));
    let view = wait_until(&mut policies, |view| !view.table.revisions.is_empty()).await;
    assert!(view.table.revisions.values().all(|it| it.policy.is_some()));
    assert!(view.table.services.is_empty());

    let (decisions, reports) = (Outbox::new(), Outbox::new());
    let outbox = decisions.clone();
    let (_heart, heartbeats) = watch::channel(common::wire::AutoscalerHeartbeat::default());
    tokio::spawn(async move { autoscaler.send_decisions(&outbox, &heartbeats).await });
    let outbox = reports.clone();
    tokio::spawn(async move { agent.report_pods(&outbox).await });
    decisions.set(NamespacedName::new("default", "hello-00001"), hello_decision(1));
    let uid = wait_until(&mut node_spec_rx, |it| it.pods.len() == 1)
        .await
        .pods
        .into_keys()
        .next()
        .expect("one");
    reports.set(PodReportKey::Pod(uid.clone()), ready_pod_report(&uid));
    let ready = |view: &common::wire::RouteView| {
        view.table.pods.get(&uid).is_some_and(|pod| pod.phase == RoutingPhase::Ready)
    };
    wait_until(&mut table, ready).await;

    decisions.set(NamespacedName::new("default", "hello-00001"), hello_decision(0));
    let draining = |view: &common::wire::RouteView| {
        view.table.pods.get(&uid).is_some_and(|pod| pod.phase == RoutingPhase::Draining)
    };
    let version = wait_until(&mut table, draining).await.version;
    let PodReportItem::Observed(last) = ready_pod_report(&uid) else { unreachable!("a pod") };
    reports.set(
        PodReportKey::Pod(uid.clone()),
        PodReportItem::Observed(PodObservation { drained: true, ..last }),
    );
    tokio::task::yield_now().await;
    assert_eq!(node_spec_rx.borrow().pods.len(), 1, "no component has acknowledged the drain");
    reports.set(PodReportKey::Applied, PodReportItem::Applied(version));
    reports.set(PodReportKey::DrainAck(uid.clone()), PodReportItem::DrainAck(uid.clone()));
    wait_until(&mut node_spec_rx, |it| it.pods.is_empty()).await;
    wait_until(&mut table, |view| view.table.pods.is_empty()).await;

    shutdown.cancel();
    server.await.expect("no panic").expect("served");
}

#[tokio::test]
async fn a_reporter_that_disconnected_is_not_waited_for() {
    let folder = tempfile::tempdir().expect("a folder");
    let (endpoint, shutdown) = (socket_endpoint(&folder), CancellationToken::new());
    let (node_spec, _node_spec_rx) = watch::channel(LocalNodeSpec::default());
    let shared = Arc::new(ControllerRuntime::new(
        ControllerStateMachine::new(ClusterState::default(), Outbox::new()),
        node_spec,
    ));
    shared.release_node_spec();
    let (server, at, stop) = (Arc::clone(&shared), endpoint.clone(), shutdown.clone());
    let server = tokio::spawn(async move { serve(server, &at, stop).await });
    let stopped = CancellationToken::new();
    let agent = new_link(&endpoint, ClientComponent::Agent, &stopped);
    tokio::spawn(async move { agent.report_pods(&Outbox::new()).await });
    while shared.with_machine(|machine| machine.cluster().pods.reporters.is_empty()) {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    stopped.cancel();
    while shared.with_machine(|machine| !machine.cluster().pods.reporters.is_empty()) {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    assert_eq!(
        shared.with_machine(|machine| machine.route_message(&RouteKey::Pod("none".into()))),
        None
    );
    shutdown.cancel();
    server.await.expect("no panic").expect("served");
}

#[tokio::test]
async fn an_agent_learns_the_zone_of_its_own_node_and_its_changes() {
    let folder = tempfile::tempdir().expect("a folder");
    let (endpoint, shutdown) = (socket_endpoint(&folder), CancellationToken::new());
    let (shared, _node_spec_rx) = hello_controller();
    let (server, at, stop) = (Arc::clone(&shared), endpoint.clone(), shutdown.clone());
    let server = tokio::spawn(async move { serve(server, &at, stop).await });
    let observe = |node: &str, zone: &str| {
        let labels = serde_json::json!({"topology.kubernetes.io/zone": zone});
        let object = serde_json::json!({"metadata": {"name": node, "labels": labels}});
        shared.step(ControllerEvent::ObjectObserved {
            resource: crate::model::object::ResourceKind::Node,
            name: NamespacedName::new("", node),
            object: Some(Box::new(object)),
        });
    };
    let zones = |view: &common::wire::RouteView| -> Vec<String> {
        view.table.nodes.values().map(|it| format!("{} {}", it.name, it.zone)).collect()
    };
    observe("n1", "a");
    observe("n2", "a");
    let agent = new_link(&endpoint, ClientComponent::Agent, &shutdown);
    let mut agent_table = watch_route_table(agent);
    wait_until(&mut agent_table, |view| zones(view) == ["n1 a"]).await;
    let activator = new_link(&endpoint, ClientComponent::Activator, &shutdown);
    let mut activator_table = watch_route_table(activator);
    let view = wait_until(&mut activator_table, |view| view.version > 0).await;
    assert_eq!(zones(&view), [""; 0]);
    observe("n2", "b");
    observe("n1", "b");
    let view = wait_until(&mut agent_table, |view| zones(view) != ["n1 a"]).await;
    assert_eq!(zones(&view), ["n1 b"]);
    shutdown.cancel();
    server.await.expect("no panic").expect("served");
}

#[test]
fn each_component_gets_the_settings_that_concern_it() {
    let template = common::request_log::LogTemplate::parse("{{.TraceID}}").expect("a good one");
    let request_log = Some(wire::RequestLogSettings { template, logs_probes: false });
    let levels = wire::LogLevels { agent: wire::LogLevel::Debug, ..wire::LogLevels::default() };
    let defaults = wire::GlobalSettings::default();
    let metrics = wire::RequestMetricsSettings {
        collector: None,
        interval: wire::RequestMetricsSettings::DEFAULT_INTERVAL,
    };
    let both = wire::GlobalSettings {
        request_log: request_log.clone(),
        log_levels: levels,
        telemetry: wire::TelemetrySettings { traces: None, metrics: Some(metrics) },
        ..defaults.clone()
    };
    let limited = |it: &wire::GlobalSettings, role| match limit_to_role(
        RouteChange::Settings(it.clone()),
        role,
    ) {
        Some(RouteChange::Settings(it)) => Some(it),
        _ => None,
    };
    assert_eq!(limited(&both, ClientComponent::Activator), Some(both.clone()));
    let level = wire::GlobalSettings { log_levels: levels, ..defaults.clone() };
    assert_eq!(limited(&both, ClientComponent::Agent), Some(level.clone()));
    assert_eq!(limited(&both, ClientComponent::Autoscaler), Some(level));
    assert_eq!(
        limited(&wire::GlobalSettings { request_log, ..defaults }, ClientComponent::Agent),
        None
    );
}

/// Returns the changes of encoded items.
fn decode_changes(pieces: &[Bytes]) -> Vec<RouteChange> {
    let mut changes = Vec::new();
    for mut rest in pieces.iter().cloned() {
        while !rest.is_empty() {
            assert_eq!(rest.get_u8(), 0, "not compressed");
            let length = rest.get_u32() as usize;
            let item = raw::RouteItem::decode(rest.split_to(length)).expect("a whole item");
            changes.push(RouteItem::try_from(item).expect("a valid item").change);
        }
    }
    changes
}

#[test]
fn only_activators_get_certificates() {
    let entry = |name: &str, has_material: bool| {
        let key = PrivateKeyBytes::new(vec![2]);
        let material = CertificateMaterial { chain: vec![vec![1]], key };
        let material = has_material.then(|| Arc::new(material));
        CertificateEntry { name: NamespacedName::new("default", name), material }
    };
    let new = RouteChange::Certificate(entry("new", true));
    let kept = RouteChange::Certificate(entry("kept", false));
    let removed = RouteKey::Certificate(NamespacedName::new("default", "removed"));
    let material = Some(Arc::new(ClientCaMaterial(vec![vec![1]])));
    let client_ca = ClientCaEntry { name: NamespacedName::new("default", "clients"), material };
    let client_ca = RouteChange::ClientCa(client_ca);
    let pod = RouteKey::Pod("other".into());
    let key_of = |change: &RouteChange| change.key().expect("a subject");
    let changes = vec![
        (key_of(&new), Some(new.clone())),
        (key_of(&kept), Some(kept.clone())),
        (removed.clone(), None),
        (key_of(&client_ca), Some(client_ca.clone())),
        (pod.clone(), None),
    ];
    let batch = RouteMessageBatch { version: 7, changes };
    let others = [RouteChange::Removed(pod), RouteChange::Synced];
    let own = vec![new.clone(), kept, RouteChange::Removed(removed), client_ca.clone()];
    let all = [own, others.to_vec()].concat();
    let got = |role| decode_changes(&encode_batch(&batch, false, role, limit_to_role));
    assert_eq!(got(ClientComponent::Activator), all);
    for role in [ClientComponent::Agent, ClientComponent::Autoscaler] {
        // Not even the names of removed ones.
        assert_eq!(got(role), others, "{role:?}");
        // The second line of defence.
        assert_eq!(limit_to_role(new.clone(), role), None, "{role:?}");
        assert_eq!(limit_to_role(client_ca.clone(), role), None, "{role:?}");
    }
}

/// Otherwise an autoscaler would get a removal for each of thousands of services.
#[test]
fn a_whole_table_has_no_removals() {
    let name = NamespacedName::new("default", "a");
    let service = RouteChange::Service(fixtures::service(&name, &name));
    let revision = RouteChange::Revision(fixtures::revision(&name, "a"));
    let (service_key, pod) = (RouteKey::Service(name.clone()), RouteKey::Pod("gone".into()));
    let changes = vec![
        (service_key.clone(), Some(service)),
        (RouteKey::Revision(name), Some(revision.clone())),
        (pod.clone(), None),
    ];
    let batch = RouteMessageBatch { version: 7, changes };
    let role = ClientComponent::Autoscaler;
    let got = |is_whole| decode_changes(&encode_batch(&batch, is_whole, role, limit_to_role));
    assert_eq!(got(true), [revision.clone(), RouteChange::Synced]);
    let [service, pod] = [service_key, pod].map(RouteChange::Removed);
    assert_eq!(got(false), [service, revision, pod, RouteChange::Synced]);
}

/// Both streams begin with the same snapshot, which is encoded for each kind of activator.
#[tokio::test]
async fn only_an_activator_that_announces_it_gets_reserved_hosts_as_items() {
    const HOST: &str = "www.shop.test";
    let (shared, _node_spec_rx) = hello_controller();
    let claim = json!({"metadata": {"name": HOST}, "spec": {"namespace": "default"}});
    let reference =
        json!({"apiVersion": "serving.knative.dev/v1", "kind": "Service", "name": "no"});
    let metadata = json!({"name": HOST, "namespace": "default"});
    let mapping = json!({"metadata": metadata, "spec": {"ref": reference}});
    for (resource, namespace, object) in [
        (ResourceKind::ClusterDomainClaim, "", claim),
        (ResourceKind::DomainMapping, "default", mapping),
    ] {
        let (name, object) = (NamespacedName::new(namespace, HOST), Some(Box::new(object)));
        shared.step(ControllerEvent::ObjectObserved { resource, name, object });
    }
    let routes = run_broadcast(&shared);
    let grpc = ControllerGrpc {
        shared,
        activator_routes: Arc::clone(&routes),
        delayed_routes: routes,
        next_stream_id: Arc::default(),
        election: Arc::default(),
        shutdown: CancellationToken::new(),
    };
    let mut streams = Vec::new();
    for reads_reserved_hosts in [true, false] {
        let role = raw::Role::Activator.into();
        let name = "a".to_owned();
        let message = raw::Subscriber { role, name, node: String::new(), reads_reserved_hosts };
        let mut pieces = grpc.open_stream(Request::new(message)).await.expect("a stream");
        let changes = decode_changes(&[pieces.next().await.expect("the snapshot")]);
        assert!(changes.contains(&RouteChange::Synced), "in one piece");
        let item = RouteChange::ReservedHost(HOST.to_owned());
        assert_eq!(changes.contains(&item), reads_reserved_hosts);
        streams.push(pieces);
    }
}

#[tokio::test]
async fn streams_that_begin_together_share_a_snapshot_and_then_get_updates() {
    let (shared, _node_spec_rx) = hello_controller();
    let broadcast = run_broadcast(&shared);
    let begin = || RouteTableSubscription::new(Arc::clone(&broadcast));
    let (mut one, mut two) = (begin(), begin());
    let (first, second) = (one.next().await, two.next().await);
    let (RouteTableUpdate::Snapshot(first), RouteTableUpdate::Snapshot(second)) = (first, second)
    else {
        panic!("a stream begins with a snapshot");
    };
    assert!(Arc::ptr_eq(&first, &second), "one snapshot for both");
    drop(first);
    // No stream sends the snapshot any longer, so a new stream gets one of the present table.
    drop(second);
    shared.step(ControllerEvent::DecisionReceived(hello_decision(1)));
    let changes_of = |update: RouteTableUpdate| -> Vec<_> {
        assert!(matches!(update, RouteTableUpdate::Changes(_)));
        update.batches().iter().flat_map(|it| it.routes().changes.clone()).collect()
    };
    let (one, two) = (changes_of(one.next().await), changes_of(two.next().await));
    assert!(!one.is_empty() && one == two);
    let third = begin().next().await;
    let whole = &third.batches()[0].routes().changes;
    assert!(one.iter().all(|step| whole.contains(step)), "with the change");
}

#[tokio::test]
async fn a_stream_that_begins_after_many_changes_gets_a_new_snapshot() {
    let (shared, _node_spec_rx) = hello_controller();
    let broadcast = run_broadcast(&shared);
    let old = RouteTableSubscription::new(Arc::clone(&broadcast)).next().await;
    shared.step(ControllerEvent::DecisionReceived(hello_decision(1)));
    let new = RouteTableSubscription::new(Arc::clone(&broadcast)).next().await;
    let [old, new] = [old, new].map(|it| it.batches()[0].version());
    assert!(old < new, "{old} is not before {new}");
}
