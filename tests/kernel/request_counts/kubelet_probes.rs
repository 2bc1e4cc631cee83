//! Shell: probes of the kubelet and other requests of the node, by address and `User-Agent` or by the kubelet's cgroup.

use super::*;

impl CountFixture {
    /// Asserts that `served` requests were served, and waits until `counted` of them have begun and ended.
    #[track_caller]
    fn assert_counted(&mut self, served: u64, counted: u64) {
        assert_eq!(self.server.request_count(), served);
        let until = Instant::now() + WAIT_TIMEOUT;
        let state = |fixture: &Self| fixture.kernel.maps.pod_state(fixture.slot());
        while (state(self).connections != 0 || state(self).in_flight != 0) && Instant::now() < until
        {
            thread::sleep(Duration::from_millis(10));
        }
        let totals = self.kernel.maps.totals(self.slot());
        assert_eq!((totals.started, totals.finished), (counted, counted));
        let state = state(self);
        assert_eq!(
            (state.in_flight, state.connections, state.awaiting_first_request),
            (0, 0, 0),
            "{state:?}"
        );
    }
}

fn request_with_user_agent(agent: &str) -> String {
    format!("GET /length/5 HTTP/1.1\r\nHost: 10.99.0.2:8080\r\nUser-Agent: {agent}\r\n\r\n")
}

const KUBELET_USER_AGENT: &str = "kube-probe/1.36";

#[test]
fn the_kubelets_probes_are_no_requests_and_others_from_the_node_are() {
    let mut fixture = CountFixture::new();
    fixture.kernel.write_node_addresses();
    let node = fixture.kernel.node_netns();
    let (mut served, mut counted) = (0, 0);
    for round in 0..50 {
        for (netns, agent, counts) in [
            (&node, KUBELET_USER_AGENT, false),
            (&node, "curl/8.14", true),
            (&fixture.client.netns, KUBELET_USER_AGENT, true),
        ] {
            let mut stream = connect_from(netns, &fixture.pod.ipv4());
            fixture.send_and_read(&mut stream, &request_with_user_agent(agent), "xxxxx");
            served += 1;
            counted += u64::from(counts);
            if round % 2 == 0 {
                // The first request decides if a connection belongs to a probe.
                fixture.send_and_read(
                    &mut stream,
                    &request_with_user_agent(KUBELET_USER_AGENT),
                    "xxxxx",
                );
                served += 1;
                counted += u64::from(counts);
            }
        }
        // Equivalent to a TCP probe: a connection without a request.
        drop(connect_from(&node, &fixture.pod.ipv4()));
    }
    fixture.assert_counted(served, counted);
}

#[test]
fn a_request_from_the_node_counts_however_it_is_cut() {
    let mut fixture = CountFixture::new();
    fixture.kernel.write_node_addresses();
    let node = fixture.kernel.node_netns();
    let request = request_with_user_agent("curl/8.14");
    for cut in 1..request.len() {
        let mut stream = connect_from(&node, &fixture.pod.ipv4());
        stream.write_all(&request.as_bytes()[..cut]).unwrap();
        // So that the server reads the parts one by one, if the machine is not busy.
        thread::sleep(Duration::from_millis(1));
        stream.write_all(&request.as_bytes()[cut..]).unwrap();
        read_until(&mut stream, "xxxxx");
    }
    let served = request.len() as u64 - 1;
    fixture.assert_counted(served, served);
}

#[test]
fn the_kubelets_probes_of_a_deferred_listener_are_no_requests() {
    let mut fixture = SharedKernelFixture::new();
    let (pod, client) = (fixture.add_pod(), fixture.add_client());
    fixture.register_pod(&pod, 0);
    fixture.write_node_addresses();
    let nginx = NginxFixture::start(&pod);
    for _ in 0..20 {
        for (netns, agent) in [
            (&fixture.node_netns(), KUBELET_USER_AGENT),
            (&fixture.node_netns(), "curl/8"),
            (&client.netns, KUBELET_USER_AGENT),
        ] {
            let mut stream = connect_from(netns, &pod.ipv4());
            stream.write_all(request_with_user_agent(agent).as_bytes()).unwrap();
            read_until(&mut stream, "hello");
        }
    }
    let slot = u32::from(pod.number);
    let deadline = Instant::now() + WAIT_TIMEOUT;
    while fixture.maps.pod_state(slot).connections != 0 && Instant::now() < deadline {
        thread::sleep(Duration::from_millis(10));
    }
    assert_eq!(nginx.stop(), 60);
    let (totals, state) = (fixture.maps.totals(slot), fixture.maps.pod_state(slot));
    assert_eq!((totals.started, totals.finished), (40, 40), "{state:?}");
    assert_eq!(
        (state.in_flight, state.connections, state.awaiting_first_request),
        (0, 0, 0),
        "{state:?}"
    );
}

#[test]
fn whatever_the_kubelets_cgroup_connects_to_is_a_probe() {
    let mut fixture = CountFixture::exclusive();
    let kubelet = fixture.kernel.paths().clients.join("kubelet");
    std::fs::create_dir(&kubelet).unwrap();
    let unmarked = fixture.kernel.programs.take();
    assert!(unmarked.is_some_and(|programs| !programs.is_kubelet_marked()));
    let paths = agent::paths::AgentPaths {
        kubelet: Some(kubelet.clone()),
        ..fixture.kernel.paths().clone()
    };
    let programs = agent::kernel::programs::EbpfPrograms::load(paths).unwrap();
    assert_eq!(programs.keep_attached().unwrap(), 0);
    assert!(programs.is_kubelet_marked());
    fixture.kernel.programs = Some(programs);
    let url = format!("http://{}:{SERVING_PORT}/length/5", fixture.pod.ipv4());
    let node = fixture.kernel.node_netns();
    for _ in 0..20 {
        for cgroup in [&kubelet, &fixture.client.cgroup] {
            let script = "echo $$ > \"$1\" && exec ip netns exec \"$2\" curl -s \"$3\"";
            let mut sh = Command::new("sh");
            sh.args(["-c", script, "sh"]).arg(cgroup.join("cgroup.procs")).args([&node, &url]);
            assert_eq!(sh.output().unwrap().stdout, b"xxxxx");
        }
    }
    fixture.assert_counted(40, 20);
}
