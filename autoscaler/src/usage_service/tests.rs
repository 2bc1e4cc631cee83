use std::time::Duration;

use common::{
    fixtures,
    link::ComponentLink,
    outbox::Outbox,
    wire::{
        ClientComponent, ComponentReplica, NamespacedName, RequestTotals, RouteChange, RouteKey,
        ScaleDecision, ScaleItem, UsageKey, UsageSample,
        raw::{
            routes_server::{Routes, RoutesServer},
            scale_server::{Scale, ScaleServer},
        },
    },
};
use tokio::sync::mpsc;

use super::*;
use crate::{AutoscalerConfig, usage::tests::policy};

/// A controller that serves one sleeping Revision and passes on the decisions it receives.
struct FakeScaleController {
    routes: Outbox<RouteKey, RouteChange>,
    decisions: mpsc::Sender<ScaleDecision>,
    shutdown: CancellationToken,
}

type FakeRouteStream =
    std::pin::Pin<Box<dyn tokio_stream::Stream<Item = Result<raw::RouteItem, Status>> + Send>>;

#[tonic::async_trait]
impl Routes for FakeScaleController {
    type WatchStream = FakeRouteStream;

    async fn watch(
        &self,
        _: Request<raw::Subscriber>,
    ) -> Result<Response<FakeRouteStream>, Status> {
        let stream = link::route_stream(self.routes.subscribe(), self.shutdown.clone(), Some);
        Ok(Response::new(Box::pin(stream)))
    }
}

#[tonic::async_trait]
impl Scale for FakeScaleController {
    async fn decide(
        &self,
        request: Request<Streaming<raw::ScaleItem>>,
    ) -> Result<Response<raw::Empty>, Status> {
        let decisions = self.decisions.clone();
        link::receive_items(request.into_inner(), &self.shutdown, |item| {
            if let ScaleItem::Decision(decision) = item {
                decisions.try_send(decision).expect("a test reads its decisions");
            }
        })
        .await?;
        Ok(Response::new(raw::Empty {}))
    }
}

fn revision(name: &NamespacedName) -> RouteChange {
    RouteChange::Revision(common::wire::RevisionEntry {
        policy: Some(policy().into()),
        ..fixtures::revision(name, "hello")
    })
}

fn waiting(revision: &NamespacedName, started: u64) -> UsageSample {
    let totals = RequestTotals { started, started_sum_ns: started * 5, ..RequestTotals::default() };
    let key = UsageKey { revision: revision.clone(), pod: None };
    UsageSample { key, read_at_ns: 5, totals, status: vec![], latency: vec![], client: None }
}

/// A waiting request, reported over real sockets, becomes a decision; a burst raises it at once.
#[tokio::test]
async fn a_waiting_request_is_decided_over_the_wire() {
    let folder = tempfile::tempdir().expect("a folder");
    let socket = |name| format!("unix:{}/{name}", folder.path().display());
    let (usage, controller) = (socket("usage"), socket("controller"));
    let (shutdown, name) =
        (CancellationToken::new(), NamespacedName::new("default", "hello-00001"));
    let (send, mut decisions) = mpsc::channel(16);
    let routes = Outbox::new();
    routes.set(RouteKey::Revision(name.clone()), revision(&name));
    let kept_name = NamespacedName::new("default", "kept-00001");
    let RouteChange::Revision(mut entry) = revision(&kept_name) else { panic!("a revision") };
    entry.policy = Some(common::wire::ScalePolicy { min_scale: 1, ..policy() }.into());
    routes.set(RouteKey::Revision(kept_name.clone()), RouteChange::Revision(entry));
    let serve = |decisions| FakeScaleController {
        routes: routes.clone(),
        decisions,
        shutdown: shutdown.clone(),
    };
    let router = link::server_builder()
        .add_service(RoutesServer::new(serve(send.clone())))
        .add_service(ScaleServer::new(serve(send)));
    let (endpoint, stop) = (controller.clone(), shutdown.clone());
    tokio::spawn(async move { link::serve(&endpoint, router, stop).await });
    let config = AutoscalerConfig {
        usage: usage.clone(),
        controller,
        admin: ([127, 0, 0, 1], 0).into(),
        name: "autoscaler".into(),
        tick_ms: 2000,
        identity: None,
    };
    let autoscaler = tokio::spawn(crate::run(config, shutdown.clone()));

    let requested_scale =
        |decision: Option<ScaleDecision>| decision.and_then(|decision| decision.requested_scale);
    // A Revision that is asleep gets no decision; the decision on the other one shows that both are known.
    let first =
        decisions.recv().await.map(|decision| (decision.revision, decision.requested_scale));
    assert_eq!(first, Some((kept_name, Some(1))));
    let replica =
        ComponentReplica { role: ClientComponent::Activator, name: "a".into(), node: "n".into() };
    let (leave, wait_queues) = (shutdown.child_token(), Outbox::new());
    let activator = ComponentLink::new(usage, replica, leave.clone());
    wait_queues.set(waiting(&name, 1).key, waiting(&name, 1));
    let reporting = tokio::spawn({
        let wait_queues = wait_queues.clone();
        async move { activator.report_usage(&wait_queues).await }
    });
    assert_eq!(
        requested_scale(decisions.recv().await),
        Some(1),
        "the waiting request is reported at the opening"
    );
    wait_queues.set(waiting(&name, 300).key, waiting(&name, 300));
    assert_eq!(requested_scale(decisions.recv().await), Some(5), "a burst is decided at once");

    leave.cancel();
    reporting.await.expect("no panic");
    shutdown.cancel();
    autoscaler.await.expect("no panic").expect("ends well");
}

#[tokio::test]
async fn what_waits_where_a_stream_ends_is_taken_to_wait_on() {
    let evaluator = Arc::new(ScaleEvaluator::new(Duration::from_secs(2), 0));
    let name = NamespacedName::new("default", "hello-00001");
    let mut table = common::wire::RouteTable::default();
    let RouteChange::Revision(entry) = revision(&name) else { panic!("a revision") };
    table.revisions.insert(name.clone(), entry);
    evaluator.update(|revisions, now| revisions.apply_routes(now, &table, &table.keys()));
    let mut report = UsageReportStream {
        evaluator: Arc::clone(&evaluator),
        peer: TlsPeer::Unauthenticated,
        sender: None,
        stream: None,
    };
    let replica =
        ComponentReplica { role: ClientComponent::Activator, name: "a".into(), node: "n".into() };
    let waiting_requests = || {
        evaluator.read(|revisions| {
            revisions.revisions().map(|(_, revision)| revision.load.waiting()).sum::<u64>()
        })
    };
    report.handle_item(UsageItem::Sample(waiting(&name, 3))).expect("allowed");
    assert_eq!(waiting_requests(), 0, "the stream has not named its sender");
    report.handle_item(UsageItem::Sender(replica)).expect("allowed");
    report.handle_item(UsageItem::Sample(waiting(&name, 3))).expect("allowed");
    report.handle_item(UsageItem::Synced).expect("allowed");
    assert_eq!(waiting_requests(), 3);
    drop(report);
    // Only a lost stream is known: the requests may still wait, and must not lose their pod.
    assert_eq!(waiting_requests(), 3, "for a while, or until its sender reports again");
    let decision = evaluator.outbox().get(&name);
    assert_eq!(decision.and_then(|decision| decision.requested_scale), Some(1));
}

#[test]
fn an_agent_counts_only_the_pods_of_its_own_node() {
    let evaluator = Arc::new(ScaleEvaluator::new(Duration::from_secs(2), 0));
    let identity = "spiffe://rouse/agent/n1/agent-1/a1".parse().expect("an identity");
    let peer = TlsPeer::Authenticated(Arc::new(identity));
    let report = |role, node: &str| {
        let mut report = UsageReportStream {
            evaluator: Arc::clone(&evaluator),
            peer: peer.clone(),
            sender: None,
            stream: None,
        };
        let replica = ComponentReplica { role, name: node.into(), node: node.into() };
        let opened = report.handle_item(UsageItem::Sender(replica));
        (report, opened)
    };
    for (role, node) in [
        (ClientComponent::Agent, "n2"),
        (ClientComponent::Activator, "n1"),
        (ClientComponent::Autoscaler, "n1"),
    ] {
        assert!(report(role, node).1.is_err(), "{role:?} {node}");
    }
    // The certificate proves role and node, which bound what may be reported.
    let (mut own_report, opened) = report(ClientComponent::Agent, "n1");
    assert_eq!(opened, Ok(()));
    let name = NamespacedName::new("default", "hello-00001");
    assert!(
        own_report.handle_item(UsageItem::Sample(waiting(&name, 3))).is_err(),
        "waits at activators only"
    );
    let mut counted = waiting(&name, 3);
    counted.key.pod = Some("unknown".into());
    assert_eq!(own_report.handle_item(UsageItem::Sample(counted)), Ok(()));
}
