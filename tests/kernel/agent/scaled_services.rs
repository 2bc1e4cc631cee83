//! Shell: a pod of a scaled Service: its ports in the kernel's maps, connections of raw TCP, and the pod server.

use common::wire::{AppProtocol, PodPort};

use super::{shared_agent::SharedAgentFixture, *};

impl AgentFixture {
    /// Puts the pod into the RouteTable as one that Rouse did not make, with these ports for a Service.
    fn set_foreign_pod(&self, ports: Vec<PodPort>) {
        let name = NamespacedName::new("default", "hello-00001");
        let pod = PodEntry {
            name: "hello-1".into(),
            node: "n1".into(),
            ports,
            keeps_binds: true,
            ..fixtures::pod(&self.pod_uid(), &name, RoutingPhase::Starting)
        };
        let revision = fixtures::revision(&name, "hello");
        self.routes.set(RouteKey::Revision(name), RouteChange::Revision(revision));
        self.routes.set(RouteKey::Pod(pod.uid.clone()), RouteChange::Pod(pod.into()));
    }

    /// Waits until the only pod in the maps has these flags.
    fn wait_flags(&self, flags: u16) {
        let deadline = Instant::now() + WAIT_TIMEOUT;
        loop {
            let found: Vec<u16> = self.slots().values().map(|it| it.flags).collect();
            if found == [flags] {
                return;
            }
            assert!(Instant::now() < deadline, "flags {flags} never come, but {found:?}");
            thread::sleep(Duration::from_millis(1));
        }
    }
}

fn database_port(port: u16) -> PodPort {
    fixtures::pod_port(5432, port, AppProtocol::Tcp)
}

#[test]
fn a_connection_of_raw_tcp_is_one_request_until_it_closes() {
    let mut fixture = SharedAgentFixture::new();
    fixture.set_foreign_pod(vec![database_port(8080)]);
    fixture.start_pod();
    fixture.send_to_pod("keep");
    fixture.send_to_pod("listen");
    fixture.wait_pod("ready", |pod| pod.ready);
    let node = NetworkNamespace::open(format!("/run/netns/{}-n", fixture.name)).expect("it exists");
    let connect = || {
        let mut stream = TcpStream::connect(POD_ADDRESS)?;
        // With its first byte a connection of the node itself is no probe of the kubelet.
        stream.write_all(b"\x00").map(|()| stream)
    };
    let first = node.run_inside("connect", connect).expect("the pod listens");
    let second = node.run_inside("connect", connect).expect("the pod listens");
    let usage = fixture.wait_usage("two connections", |usage| usage.totals.started == 2);
    assert_eq!(usage.totals.finished, 0);
    drop(first);
    fixture.send_to_pod("drop");
    let usage = fixture.wait_usage("both have closed", |usage| usage.totals.finished == 2);
    assert_eq!(usage.totals.started, 2);
    drop(second);
}

#[test]
fn ports_that_change_are_registered_again_while_the_pod_serves() {
    let mut fixture = SharedAgentFixture::new();
    fixture.set_pod(RoutingPhase::Starting, ProbeHandler::Listen);
    fixture.start_pod();
    fixture.send_to_pod("listen");
    fixture.wait_pod("ready", |pod| pod.ready);
    fixture.wait_flags(abi::POD_WIDEN_BIND);
    let web = fixtures::pod_port(80, 8080, AppProtocol::Http1);
    fixture.set_foreign_pod(vec![web, database_port(5432)]);
    fixture.wait_flags(abi::POD_HAS_PORTS);
    fixture.set_foreign_pod(vec![web]);
    fixture.wait_flags(0);
    fixture.set_foreign_pod(vec![database_port(8080)]);
    fixture.wait_flags(abi::POD_OPAQUE);
    // All reports so far: none says that the pod is unready.
    let uid = fixture.pod_uid();
    let is_unready = |item: &PodReportItem| match item {
        PodReportItem::Observed(pod) => pod.uid == uid && !pod.ready,
        _ => false,
    };
    assert_eq!(fixture.reports.try_iter().find(is_unready), None);
}

#[test]
fn the_protocol_of_the_revision_tells_how_connections_of_its_pods_count() {
    let mut fixture = SharedAgentFixture::new();
    fixture.set_pod(RoutingPhase::Starting, ProbeHandler::Listen);
    fixture.start_pod();
    fixture.send_to_pod("listen");
    fixture.wait_pod("ready", |pod| pod.ready);
    fixture.wait_flags(abi::POD_WIDEN_BIND);
    let name = NamespacedName::new("default", "hello-00001");
    let tcp = RevisionEntry { protocol: AppProtocol::Tcp, ..fixtures::revision(&name, "hello") };
    fixture.routes.set(RouteKey::Revision(name), RouteChange::Revision(tcp));
    fixture.wait_flags(abi::POD_WIDEN_BIND | abi::POD_OPAQUE);
}

#[test]
fn the_pod_server_of_a_foreign_pod_opens_once_the_pod_is_ready() {
    let mut fixture = SharedAgentFixture::new();
    fixture.set_foreign_pod(vec![database_port(8080)]);
    fixture.start_pod();
    fixture.wait_pod("found", |pod| pod.address.is_some());
    let page = fixture.get_page("p", POD_SERVER_ADDRESS, WAIT_FOR_DRAIN_PATH);
    assert_eq!(page, "", "its own process may want the port");
    fixture.send_to_pod("listen");
    fixture.wait_pod("ready", |pod| pod.ready);
    fixture.pod_server_page("p");
}
