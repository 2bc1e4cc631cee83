//! Shell: reports of ready pods at an activator of the agent's node.

use common::wire::ActivatorEntry;
use tokio_stream::wrappers::TcpListenerStream;

use super::*;

/// Port at which the activator accepts reports.
const REPORT_PORT: u16 = 7120;

/// Starts an activator in the node's namespace, and puts it into the RouteTable. Returns the reports that it receives.
fn start_activator(fixture: &AgentFixture) -> mpsc::Receiver<PodReportItem> {
    let node = NetworkNamespace::open(format!("/run/netns/{}-n", fixture.name)).expect("it exists");
    let listen = || TcpListener::bind(("10.77.0.1", REPORT_PORT));
    let listener = node.run_inside("listen", listen).expect("a free port");
    listener.set_nonblocking(true).expect("a socket");
    let (reports, received) = mpsc::channel();
    let fake = FakeControlPlane { routes: Outbox::new(), reports, usages: mpsc::channel().0 };
    fixture.servers.spawn(async move {
        let listener = tokio::net::TcpListener::from_std(listener).expect("a socket");
        let router = Server::builder().add_service(pods_server::PodsServer::new(fake));
        router.serve_with_incoming(TcpListenerStream::new(listener)).await
    });
    let addresses = vec!["10.77.0.1".parse().expect("an address")];
    let activator = fixtures::activator("activator-1", addresses);
    let activator = ActivatorEntry { node: "n1".into(), ..activator };
    let key = RouteKey::Activator(activator.name.clone());
    fixture.routes.set(key, RouteChange::Activator(activator));
    received
}

#[test]
fn a_ready_pod_is_reported_to_the_activator_of_its_node() {
    let mut fixture = AgentFixture::new("activator");
    let received = start_activator(&fixture);
    let next = || received.recv_timeout(WAIT_TIMEOUT).expect("an item");
    fixture.set_pod(RoutingPhase::Starting, ProbeHandler::Listen);
    let mut command = fixture.agent_command();
    command.env("ROUSE_ACTIVATOR_PEER_PORT", REPORT_PORT.to_string());
    fixture.agent = Some(command.spawn().expect("nsenter"));
    fixture.wait_attached();
    let PodReportItem::Sender(sender) = next() else { panic!("a stream begins with its sender") };
    assert_eq!((&*sender.name, &*sender.node), ("n1", "n1"));
    assert_eq!(next(), PodReportItem::Synced, "no pod is ready yet");

    fixture.start_pod();
    fixture.send_to_pod("listen");
    let PodReportItem::Observed(pod) = next() else { panic!("the pod listens") };
    let address = POD_ADDRESS.parse().expect("an address");
    assert_eq!((pod.uid, pod.ready, pod.address), (fixture.pod_uid(), true, Some(address)));
    assert_eq!(next(), PodReportItem::Synced);
    fixture.send_to_pod("close");
    assert_eq!(next(), PodReportItem::Removed(fixture.pod_uid()));
}
