use std::time::Duration;

use common::{
    link::{ComponentLink, PodReportKey},
    node::LocalNodeSpec,
    outbox::Outbox,
    wire::{ConnectionPath, NamespacedName, PodObservation, RouteKey, RoutingPhase, ScaleDecision},
};
use tokio::sync::watch;

use super::*;
use crate::{
    machine::ControllerStateMachine,
    parse::{self, ManifestDocument},
    policy::ScalePolicyConfig,
    world::ClusterState,
};

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
fn shared() -> (Arc<ControllerRuntime>, watch::Receiver<LocalNodeSpec>) {
    let (orders, ordered) = watch::channel(LocalNodeSpec::default());
    let shared = Arc::new(ControllerRuntime::new(
        ControllerStateMachine::new(ClusterState::default(), Outbox::new()),
        orders,
    ));
    shared.read_back();
    let ManifestDocument::Service(name, manifest) =
        parse::documents(HELLO, &ScalePolicyConfig::default()).remove(0)
    else {
        panic!("refused")
    };
    shared.step(ControllerEvent::Apply(name, manifest));
    (shared, ordered)
}

fn endpoint(folder: &tempfile::TempDir) -> String {
    format!("unix:{}/socket", folder.path().display())
}

fn link(endpoint: &str, role: ComponentRole, shutdown: &CancellationToken) -> Arc<ComponentLink> {
    let who = ComponentReplica { role, name: "n1".into(), node: "n1".into() };
    Arc::new(ComponentLink::new(endpoint, who, shutdown.clone()))
}

/// Watches the routes over `link`; the receiver gets the whole RouteTable after each batch.
fn routes(link: Arc<ComponentLink>) -> watch::Receiver<common::wire::RouteView> {
    let (tell, told) = watch::channel(common::wire::RouteView::default());
    tokio::spawn(async move {
        link.watch_routes(|view, _| drop(tell.send_replace(view.clone()))).await;
    });
    told
}

async fn until<T: Clone>(told: &mut watch::Receiver<T>, holds: impl FnMut(&T) -> bool) -> T {
    let found = tokio::time::timeout(Duration::from_secs(10), told.wait_for(holds));
    found.await.expect("in time").expect("still told").clone()
}

fn decision(wanted: u32) -> ScaleDecision {
    ScaleDecision {
        revision: NamespacedName::new("default", "hello-00001"),
        wanted: Some(wanted),
        path: ConnectionPath::Direct,
        activators: 0,
        activity: common::wire::RevisionActivity::Active,
        stable: 0.0,
        panic: 0.0,
        target: 1.0,
        ready_pods: 0,
        panicking: false,
        excess_burst_capacity: 0.0,
        reason: String::new(),
        inputs: None,
    }
}

fn seen(uid: &str) -> PodReportItem {
    PodReportItem::Seen(PodObservation {
        uid: uid.into(),
        address: Some(([10, 244, 0, 9], 8080).into()),
        also: None,
        listening: true,
        ready: true,
        drained: false,
        in_flight: 0,
        listening_since_ns: 1,
        trouble: String::new(),
    })
}

#[tokio::test]
async fn a_decision_over_the_wire_becomes_an_order_and_a_report_becomes_a_route() {
    let folder = tempfile::tempdir().expect("a folder");
    let (endpoint, shutdown) = (endpoint(&folder), CancellationToken::new());
    let (shared, mut ordered) = shared();
    let (server, at, stop) = (Arc::clone(&shared), endpoint.clone(), shutdown.clone());
    let server = tokio::spawn(async move { serve(server, &at, stop).await });

    let agent = link(&endpoint, ComponentRole::Agent, &shutdown);
    let mut table = routes(Arc::clone(&agent));
    let view = until(&mut table, |view| {
        view.table.services.contains_key(&NamespacedName::new("default", "hello"))
    })
    .await;
    assert!(view.table.revisions.values().all(|it| it.policy.is_none()));
    let autoscaler = link(&endpoint, ComponentRole::Autoscaler, &shutdown);
    let mut policies = routes(Arc::clone(&autoscaler));
    let view = until(&mut policies, |view| !view.table.revisions.is_empty()).await;
    assert!(view.table.revisions.values().all(|it| it.policy.is_some()));
    assert!(view.table.services.is_empty());

    let (decisions, reports) = (Outbox::new(), Outbox::new());
    let say = decisions.clone();
    let (_heart, alive) = watch::channel(common::wire::AutoscalerHeartbeat::default());
    tokio::spawn(async move { autoscaler.decide(&say, &alive).await });
    let say = reports.clone();
    tokio::spawn(async move { agent.report_pods(&say).await });
    decisions.set(NamespacedName::new("default", "hello-00001"), decision(1));
    let uid =
        until(&mut ordered, |it| it.pods.len() == 1).await.pods.into_keys().next().expect("one");
    reports.set(PodReportKey::Pod(uid.clone()), seen(&uid));
    let ready = |view: &common::wire::RouteView| {
        view.table.pods.get(&uid).is_some_and(|pod| pod.phase == RoutingPhase::Ready)
    };
    until(&mut table, ready).await;

    decisions.set(NamespacedName::new("default", "hello-00001"), decision(0));
    let draining = |view: &common::wire::RouteView| {
        view.table.pods.get(&uid).is_some_and(|pod| pod.phase == RoutingPhase::Draining)
    };
    let version = until(&mut table, draining).await.version;
    let PodReportItem::Seen(last) = seen(&uid) else { unreachable!("a pod") };
    reports.set(
        PodReportKey::Pod(uid.clone()),
        PodReportItem::Seen(PodObservation { drained: true, ..last }),
    );
    tokio::task::yield_now().await;
    assert_eq!(ordered.borrow().pods.len(), 1, "nobody has let go of it");
    reports.set(PodReportKey::Applied, PodReportItem::Applied(version));
    reports.set(PodReportKey::Avoided(uid.clone()), PodReportItem::Avoided(uid.clone()));
    until(&mut ordered, |it| it.pods.is_empty()).await;
    until(&mut table, |view| view.table.pods.is_empty()).await;

    shutdown.cancel();
    server.await.expect("no panic").expect("served");
}

#[tokio::test]
async fn who_no_longer_reports_is_not_waited_for() {
    let folder = tempfile::tempdir().expect("a folder");
    let (endpoint, shutdown) = (endpoint(&folder), CancellationToken::new());
    let (orders, _ordered) = watch::channel(LocalNodeSpec::default());
    let shared = Arc::new(ControllerRuntime::new(
        ControllerStateMachine::new(ClusterState::default(), Outbox::new()),
        orders,
    ));
    shared.read_back();
    let (server, at, stop) = (Arc::clone(&shared), endpoint.clone(), shutdown.clone());
    let server = tokio::spawn(async move { serve(server, &at, stop).await });
    let gone = CancellationToken::new();
    let agent = link(&endpoint, ComponentRole::Agent, &gone);
    tokio::spawn(async move { agent.report_pods(&Outbox::new()).await });
    while shared.look(|machine| machine.world().followers.is_empty()) {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    gone.cancel();
    while shared.look(|machine| !machine.world().followers.is_empty()) {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    assert_eq!(shared.look(|machine| machine.route(&RouteKey::Pod("none".into()))), None);
    shutdown.cancel();
    server.await.expect("no panic").expect("served");
}

#[test]
fn each_part_hears_of_the_settings_that_concern_it() {
    let template = common::request_log::LogTemplate::parse("{{.TraceID}}").expect("a good one");
    let request_log = Some(wire::RequestLogSettings { template, probes: false });
    let levels = wire::LogLevels { agent: wire::LogLevel::Debug, ..wire::LogLevels::default() };
    let usual = wire::GlobalSettings::default();
    let both = wire::GlobalSettings { request_log: request_log.clone(), levels, ..usual.clone() };
    let said =
        |it: &wire::GlobalSettings, role| match shape(RouteChange::Settings(it.clone()), role) {
            Some(RouteChange::Settings(it)) => Some(it),
            _ => None,
        };
    assert_eq!(said(&both, ComponentRole::Activator), Some(both.clone()));
    let level = wire::GlobalSettings { levels, ..usual.clone() };
    assert_eq!(said(&both, ComponentRole::Agent), Some(level.clone()));
    assert_eq!(said(&both, ComponentRole::Autoscaler), Some(level));
    assert_eq!(said(&wire::GlobalSettings { request_log, ..usual }, ComponentRole::Agent), None);
}

#[tokio::test]
async fn who_begins_together_is_told_the_same_whole_and_then_what_is_new() {
    let (shared, _ordered) = shared();
    let begin = || RouteTableSubscription::new(Arc::clone(&shared));
    let (mut one, mut two) = (begin(), begin());
    let (first, second) = (one.next().await, two.next().await);
    let (RouteTableUpdate::Whole(first), RouteTableUpdate::Whole(second)) = (first, second) else {
        panic!("a stream begins with the whole");
    };
    assert!(Arc::ptr_eq(&first, &second), "made once");
    drop(first);
    // No stream sends the snapshot any longer, so a new stream gets one of the present table.
    drop(second);
    shared.step(ControllerEvent::Decide(decision(1)));
    let news = |told: RouteTableUpdate| {
        assert!(matches!(told, RouteTableUpdate::News(_)));
        told.steps.clone()
    };
    let (one, two) = (news(one.next().await), news(two.next().await));
    assert!(!one.is_empty() && one == two);
    let third = begin().next().await;
    assert!(one.iter().all(|step| third.steps.contains(step)), "it has the news in it");
}

#[tokio::test]
async fn who_begins_after_much_has_changed_is_told_another_whole() {
    let (shared, _ordered) = shared();
    let old = RouteTableSubscription::new(Arc::clone(&shared)).next().await;
    shared.step(ControllerEvent::Decide(decision(1)));
    let new = RouteTableSubscription::new(Arc::clone(&shared)).next().await;
    assert!(old.version < new.version, "{} is not before {}", old.version, new.version);
}
