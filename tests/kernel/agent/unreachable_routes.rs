//! Shell: routes that end connects to ClusterIPs which nothing redirects, in a cluster without kube-proxy.

use serde_json::json;

use super::{fake_watch_server::FakeWatchServer, *};

/// Settings of an agent in a cluster without kube-proxy.
const WITHOUT_KUBE_PROXY: [(&str, &str); 2] =
    [("ROUSE_CLUSTERIP", "all"), ("ROUSE_WITHOUT_KUBE_PROXY", "true")];

/// Returns the output of `ip` in the namespace of the node.
fn ip(fixture: &AgentFixture, words: &str) -> String {
    let mut command = Command::new("ip");
    command.args(["-n", &format!("{}-n", fixture.name)]).args(words.split(' '));
    let output = command.output().expect("ip");
    assert!(output.status.success(), "ip {words}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Returns the agent's routes of both families.
fn own_routes(fixture: &AgentFixture) -> String {
    let show = |family| ip(fixture, &format!("{family} route show proto 82"));
    show("-4") + &show("-6")
}

/// Waits until the agent's routes are those to these ranges.
fn wait_own_routes(fixture: &AgentFixture, ranges: &[&str]) {
    let deadline = Instant::now() + WAIT_TIMEOUT;
    loop {
        let routes = own_routes(fixture);
        let has = |range: &&str| routes.contains(&format!("unreachable {range} "));
        if routes.lines().count() == ranges.len() && ranges.iter().all(has) {
            return;
        }
        assert!(Instant::now() < deadline, "{routes:?} instead of {ranges:?}");
        thread::sleep(Duration::from_millis(10));
    }
}

fn set_service_cidr(server: &FakeWatchServer, name: &str, cidrs: &[&str]) {
    server.set(json!({
        "apiVersion": "networking.k8s.io/v1", "kind": "ServiceCIDR",
        "metadata": {"name": name}, "spec": {"cidrs": cidrs},
    }));
}

/// Returns the errno of a connect from the node's network.
fn connect_errno(fixture: &AgentFixture, address: &str) -> Option<i32> {
    let node = NetworkNamespace::open(format!("/run/netns/{}-n", fixture.name));
    let connect = || Ok(TcpStream::connect(address).err().and_then(|it| it.raw_os_error()));
    node.expect("it exists").run_inside("connect", connect).expect("a result")
}

#[test]
fn ranges_of_cluster_ips_are_unreachable_without_kube_proxy_and_foreign_routes_stay() {
    let mut fixture = AgentFixture::new("ranges");
    let server = FakeWatchServer::start(&format!("{}-n", fixture.name));
    server.set(json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "n1"}}));
    // Packets to ClusterIPs would leave the node by this route.
    ip(&fixture, "route add default via 10.77.0.2");
    ip(&fixture, "route add blackhole 10.200.0.0/16 proto 12");
    let foreign = ip(&fixture, "route show");
    set_service_cidr(&server, "kubernetes", &["10.96.0.0/12", "fd00:10:96::/112"]);
    // Until both sources are known, connects may still need kube-proxy's rules.
    fixture.set_pod(RoutingPhase::Ready, ProbeHandler::Listen);
    fixture.start_agent_with_settings(&WITHOUT_KUBE_PROXY);
    let ranges = ["10.96.0.0/12", "fd00:10:96::/112"];
    wait_own_routes(&fixture, &ranges);
    assert_eq!(connect_errno(&fixture, "10.96.0.77:80"), Some(nix::libc::EHOSTUNREACH));

    // The routes follow the objects, and a route of another owner to the same range stays.
    ip(&fixture, "route add unreachable 10.200.0.0/16 proto static metric 7");
    set_service_cidr(&server, "more", &["10.200.0.0/16"]);
    wait_own_routes(&fixture, &["10.96.0.0/12", "10.200.0.0/16", "fd00:10:96::/112"]);
    server.delete("ServiceCIDR", "more");
    wait_own_routes(&fixture, &ranges);
    ip(&fixture, "route del unreachable 10.96.0.0/12 proto 82");
    wait_own_routes(&fixture, &ranges);

    // They outlive an agent, and end with the mode.
    fixture.kill_agent();
    assert_eq!(own_routes(&fixture).lines().count(), 2);
    fixture.start_agent_with_services("all");
    wait_own_routes(&fixture, &[]);
    ip(&fixture, "route del unreachable 10.200.0.0/16 proto static metric 7");
    assert_eq!(ip(&fixture, "route show"), foreign);
}

#[test]
fn routes_wait_for_the_end_of_connections_that_another_proxy_translates() {
    let mut fixture = AgentFixture::new("open");
    let server = FakeWatchServer::start(&format!("{}-n", fixture.name));
    server.set(json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "n1"}}));
    // The pod's namespace has the ClusterIP, as if rules of NAT led there.
    run_shell(&format!("ip -n {}-p address add 10.96.0.77/32 dev lo", fixture.name));
    ip(&fixture, "route add default via 10.77.0.2");
    let in_namespace = |name: &str| {
        NetworkNamespace::open(format!("/run/netns/{}-{name}", fixture.name)).expect("it exists")
    };
    let listen = || TcpListener::bind("10.96.0.77:80");
    let listener = in_namespace("p").run_inside("listen", listen).expect("a listener");
    let connect = || TcpStream::connect("10.96.0.77:80");
    let mut client = in_namespace("n").run_inside("connect", connect).expect("a connection");
    let (mut served, _) = listener.accept().expect("a connection");
    fixture.set_pod(RoutingPhase::Ready, ProbeHandler::Listen);
    let given = [("ROUSE_SERVICE_CIDR", "10.96.0.0/12")];
    fixture.start_agent_with_settings(&[&WITHOUT_KUBE_PROXY[..], &given].concat());
    let reason = "service-cidr: 1 connections of the node's own processes";
    fixture.wait_not_ready_reason(reason);
    assert_eq!(own_routes(&fixture), "");
    client.write_all(b"still open").expect("a route");
    let mut received = [0; 10];
    served.read_exact(&mut received).expect("the data");
    drop(client);
    wait_own_routes(&fixture, &["10.96.0.0/12"]);
    fixture.wait_without_not_ready_reason("service-cidr:");
}

#[test]
fn ranges_of_a_setting_need_no_objects_and_unknown_ranges_are_reported() {
    let mut fixture = AgentFixture::new("given");
    let server = FakeWatchServer::start(&format!("{}-n", fixture.name));
    server.set(json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "n1"}}));
    fixture.set_pod(RoutingPhase::Ready, ProbeHandler::Listen);
    fixture.start_agent_with_settings(&WITHOUT_KUBE_PROXY);
    fixture.wait_not_ready_reason("service-cidr: the ranges of ClusterIPs are not known");
    assert_eq!(own_routes(&fixture), "");
    fixture.kill_agent();
    let given = [("ROUSE_SERVICE_CIDR", "10.128.0.0/14")];
    fixture.start_agent_with_settings(&[&WITHOUT_KUBE_PROXY[..], &given].concat());
    wait_own_routes(&fixture, &["10.128.0.0/14"]);
    fixture.wait_without_not_ready_reason("service-cidr:");
    // Ranges that become unknown change nothing.
    fixture.kill_agent();
    fixture.start_agent_with_settings(&WITHOUT_KUBE_PROXY);
    fixture.wait_not_ready_reason("service-cidr: the ranges of ClusterIPs are not known");
    assert_eq!(own_routes(&fixture).lines().count(), 1);
}
