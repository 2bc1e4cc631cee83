//! Pods that their agents report as ready before the RouteTable lists them so.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::{net::SocketAddr, num::NonZeroU16, sync::Arc, time::Duration};

use activator::routes::{agent_reports::AgentStreamNumber, index::RouteIndex};
use common::{
    link::{ComponentLink, PodReportKey},
    outbox::Outbox,
    wire::{
        ClientComponent, ComponentReplica, PodEntry, PodObservation, PodReportItem, RevisionEntry,
        RouteChange, RouteKey, RoutingPhase,
    },
};
use tokio::{io::AsyncWriteExt as _, net::TcpStream};
use tokio_util::sync::CancellationToken;

use crate::{
    harness::{
        ActivatorFixture, FakeHttp1Pod, GET, OK, hello_revision, hello_service, pod, read_rest,
        revision, service, start_pod, unused_port,
    },
    running_activator::RunningActivatorFixture,
};

/// Node of the pod and of its agent.
const NODE: &str = "n1";

/// Entry of a pod that is ready as soon as its agent reports it so.
fn awaiting_pod(address: SocketAddr) -> PodEntry {
    PodEntry { node: NODE.into(), awaits_report: true, ..pod("p", address, RoutingPhase::Starting) }
}

fn set_entry(fixture: &mut ActivatorFixture, entry: PodEntry) {
    fixture.apply_change(|table| drop(table.pods.insert(entry.uid.clone(), entry)));
}

fn routes(fixture: &ActivatorFixture) -> Arc<RouteIndex> {
    Arc::clone(&fixture.activator.forwarder.routes)
}

/// Reports the pod as ready at this address, over a new stream of its agent.
fn report_ready(fixture: &ActivatorFixture, address: SocketAddr) -> AgentStreamNumber {
    let stream = routes(fixture).begin_agent_stream(NODE);
    routes(fixture).apply_agent_report(NODE, stream, "p".to_owned(), Some(address));
    stream
}

/// Sends a request, and returns its connection once it waits.
async fn send_waiting_request(fixture: &ActivatorFixture) -> TcpStream {
    let mut client = fixture.connect().await;
    client.write_all(GET.as_bytes()).await.unwrap();
    fixture.wait_for_queued(1).await;
    client
}

/// Starts an activator and a pod that is early-ready there.
async fn fixture_with_early_pod() -> (ActivatorFixture, FakeHttp1Pod, AgentStreamNumber) {
    let mut fixture = ActivatorFixture::new().await;
    let server = start_pod(OK, Duration::ZERO).await;
    set_entry(&mut fixture, awaiting_pod(server.address));
    let stream = report_ready(&fixture, server.address);
    (fixture, server, stream)
}

/// Changes a pod of the RouteTable.
type EntryChange = fn(&mut PodEntry);
/// Changes what is reported by an agent's stream.
type ReportChange = fn(&mut ActivatorFixture, AgentStreamNumber);

#[tokio::test]
async fn a_waiting_request_goes_to_a_pod_that_its_agent_reports_before_the_table() {
    let mut fixture = ActivatorFixture::new().await;
    let server = start_pod(OK, Duration::ZERO).await;
    set_entry(&mut fixture, awaiting_pod(server.address));
    let mut client = send_waiting_request(&fixture).await;
    let stream = report_ready(&fixture, server.address);
    assert!(read_rest(&mut client).await.ends_with("hello"));
    let served = routes(&fixture).revision(&revision()).unwrap();
    assert_eq!(served.ready_since(), None, "the agents do not lead connections there yet");
    assert_eq!(fixture.waiting_totals(), (1, 1));
    assert_eq!(fixture.metric("rouse_activator_early_ready_pods_total"), 1.0);

    fixture.add_ready_pod("p", server.address);
    assert!(served.ready_since().is_some());
    routes(&fixture).end_agent_stream(NODE, stream);
    assert!(fixture.exchange(GET).await.ends_with("hello"), "the table lists it");
    assert_eq!((server.requests(), fixture.abandoned_requests()), (2, 0));
}

#[tokio::test]
async fn a_report_that_comes_before_the_pod_counts_once_the_table_lists_the_pod() {
    let mut fixture = ActivatorFixture::new().await;
    let server = start_pod(OK, Duration::ZERO).await;
    report_ready(&fixture, server.address);
    let mut client = send_waiting_request(&fixture).await;
    set_entry(&mut fixture, awaiting_pod(server.address));
    assert!(read_rest(&mut client).await.ends_with("hello"));
    let confirmed = PodEntry { kubelet_ready: true, ..awaiting_pod(server.address) };
    set_entry(&mut fixture, confirmed);
    assert_eq!(fixture.metric("rouse_activator_early_ready_pods_total"), 1.0);
}

#[tokio::test]
async fn a_report_counts_only_for_a_pod_that_awaits_it() {
    let cases: [(&str, EntryChange); 4] = [
        ("the controller needs more than the report", |it| it.awaits_report = false),
        ("the pod drains", |it| it.phase = RoutingPhase::Draining),
        ("the pod is on another node", |it| it.node = "n2".into()),
        ("the table has another address", |it| it.address = Some(([127, 0, 0, 9], 9).into())),
    ];
    for (reason, change) in cases {
        let mut fixture = ActivatorFixture::new().await;
        let server = start_pod(OK, Duration::ZERO).await;
        let mut entry = awaiting_pod(server.address);
        change(&mut entry);
        set_entry(&mut fixture, entry);
        let mut client = send_waiting_request(&fixture).await;
        report_ready(&fixture, server.address);
        let served = routes(&fixture).revision(&revision()).unwrap();
        assert_eq!((served.waiting_count(), server.connections()), (1, 0), "{reason}");
        fixture.add_ready_pod("p", server.address);
        assert!(read_rest(&mut client).await.ends_with("hello"), "{reason}");
    }
}

/// Other activators grant slots only of pods that their tables list as ready.
#[tokio::test]
async fn with_a_hard_limit_requests_wait_for_the_table() {
    let mut fixture = ActivatorFixture::new().await;
    fixture.apply_change(|table| {
        let limited = RevisionEntry { container_concurrency: 1, ..hello_revision() };
        drop(table.revisions.insert(revision(), limited));
    });
    let server = start_pod(OK, Duration::ZERO).await;
    set_entry(&mut fixture, awaiting_pod(server.address));
    let mut client = send_waiting_request(&fixture).await;
    report_ready(&fixture, server.address);
    let served = routes(&fixture).revision(&revision()).unwrap();
    assert_eq!((served.waiting_count(), served.queue_metrics().at_pods), (1, 0));
    fixture.add_ready_pod("p", server.address);
    assert!(read_rest(&mut client).await.ends_with("hello"));
}

#[tokio::test]
async fn requests_wait_again_once_the_report_is_withdrawn_or_the_pod_drains() {
    let cases: [(&str, ReportChange); 4] = [
        ("it is not ready any more", |fixture, stream| {
            routes(fixture).apply_agent_report(NODE, stream, "p".to_owned(), None);
        }),
        ("the stream has ended", |fixture, stream| {
            routes(fixture).end_agent_stream(NODE, stream);
        }),
        ("a new stream has not named it yet", |fixture, _| {
            routes(fixture).begin_agent_stream(NODE);
        }),
        ("the controller drains it", |fixture, _| {
            let address = fixture.table.pods["p"].address.unwrap();
            fixture.set_pod("p", address, RoutingPhase::Draining);
        }),
    ];
    for (reason, withdraw) in cases {
        let (mut fixture, server, stream) = fixture_with_early_pod().await;
        assert!(fixture.exchange(GET).await.ends_with("hello"), "{reason}");
        withdraw(&mut fixture, stream);
        let mut client = send_waiting_request(&fixture).await;
        assert_eq!(server.requests(), 1, "{reason}");
        fixture.add_ready_pod("p", server.address);
        assert!(read_rest(&mut client).await.ends_with("hello"), "{reason}");
    }
}

#[tokio::test]
async fn an_agent_reports_ready_pods_at_the_port_for_other_activators() {
    let peer_port = NonZeroU16::new(unused_port()).unwrap();
    let mut running = RunningActivatorFixture::start("agent-reports", |config| {
        config.peer_port = Some(peer_port);
    })
    .await;
    let server = start_pod(OK, Duration::ZERO).await;
    let port = unused_port();
    let entry = awaiting_pod(server.address);
    running.routes.set(RouteKey::Revision(revision()), RouteChange::Revision(hello_revision()));
    running.routes.set(RouteKey::Service(service()), RouteChange::Service(hello_service(port)));
    running.routes.set(RouteKey::Pod("p".to_owned()), RouteChange::Pod(entry.into()));
    running.wait_in_force().await;

    let agent =
        ComponentReplica { role: ClientComponent::Agent, name: NODE.into(), node: NODE.into() };
    let stop = CancellationToken::new();
    let link = ComponentLink::new(format!("http://127.0.0.1:{peer_port}"), agent, stop.clone());
    let reports = Outbox::new();
    let outbox = reports.clone();
    let reporting = tokio::spawn(async move { link.report_pods(&outbox).await });
    let mut client = TcpStream::connect(("127.0.0.1", port)).await.unwrap();
    client.write_all(GET.as_bytes()).await.unwrap();
    let ready = PodObservation {
        uid: "p".to_owned(),
        address: Some(server.address),
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
    };
    reports.set(PodReportKey::Pod("p".to_owned()), PodReportItem::Observed(ready));
    assert!(read_rest(&mut client).await.ends_with("hello"));
    assert_eq!(server.requests(), 1);

    stop.cancel();
    reporting.await.unwrap();
    running.stop.cancel();
    running.wait_stopped().await;
}
