//! Shell: metrics of a revision equal the requests to its pods, across restarts of agents and pods.

use nix::{
    libc,
    sys::socket::{setsockopt, sockopt::Linger},
};

use super::{
    http_server::{send_and_measure, server_fixture},
    *,
};

const REVISION_LABELS: &str = "k8s_namespace_name=\"default\",kn_service_name=\"hello\",kn_configuration_name=\"hello\",kn_revision_name=\"hello-00001\"";
const DURATIONS: &str = "kn_serving_invocation_duration_seconds";

impl AgentFixture {
    /// Value of the revision's metric `name` with the additional label.
    fn metric_value(&self, name: &str, label: &str) -> Option<u64> {
        let page = self.metrics();
        let series = page.lines().filter(|line| line.starts_with(&format!("{name}{{")));
        let mut series =
            series.filter(|line| line.contains(REVISION_LABELS) && line.contains(label));
        let value = series.next()?.rsplit_once(' ')?.1.parse().expect("a number");
        assert_eq!(series.next(), None, "one series: {page}");
        Some(value)
    }

    fn wait_metric_value(&self, name: &str, value: u64) {
        let deadline = Instant::now() + WAIT_TIMEOUT;
        while self.metric_value(name, "") != Some(value) {
            assert!(Instant::now() < deadline, "{name} is never {value}: {}", self.metrics());
            thread::sleep(Duration::from_millis(10));
        }
    }

    /// Waits until `count` responses are counted. Returns the numbers by class: 2xx, 4xx, 5xx.
    fn wait_response_counts(&self, count: u64) -> [u64; 3] {
        self.wait_metric_value(&format!("{DURATIONS}_count"), count);
        ["2xx", "4xx", "5xx"].map(|class| {
            let label = format!("code=\"{class}\"");
            self.metric_value("rouse_agent_responses_total", &label).expect("a series")
        })
    }

    /// Removes the pod and its process, and starts another pod of the same revision.
    fn replace_pod(&mut self) {
        self.routes.remove(&RouteKey::Pod("uid-1".into()));
        let mut pod = self.pod.take().expect("a pod");
        pod.kill().expect("SIGKILL");
        pod.wait().expect("it ends");
        let deadline = Instant::now() + WAIT_TIMEOUT;
        while !self.slots().is_empty() {
            assert!(Instant::now() < deadline, "the pod is never forgotten");
            thread::sleep(Duration::from_millis(10));
        }
        self.pods.clear();
        // Reports about the pod that is gone.
        self.reports.try_iter().for_each(drop);
        self.set_pod(RoutingPhase::Ready, ProbeHandler::Listen);
        self.start_server();
    }
}

#[test]
fn metrics_equal_the_requests_responses_and_bytes_of_a_pod() {
    let fixture = server_fixture("figures", Duration::from_secs(300));
    let mut stream = fixture.connect();
    let paths = [("/quick", 5), ("/missing", 3), ("/failed", 1), ("/slow", 2)];
    let paths = paths.into_iter().flat_map(|(path, times)| std::iter::repeat_n(path, times));
    let bytes = paths
        .map(|path| send_and_measure(&mut stream, path))
        .fold([0, 0], |[a, b], [c, d]| [a + c, b + d]);
    assert_eq!(fixture.wait_response_counts(11), [7, 3, 1]);
    let names = ["rouse_agent_received_bytes_total", "rouse_agent_sent_bytes_total"];
    assert_eq!(names.map(|name| fixture.metric_value(name, "")), bytes.map(Some));
    assert_eq!(fixture.metric_value("rouse_agent_requests_total", ""), Some(11));
    assert_eq!(fixture.metric_value("rouse_agent_requests_in_flight", ""), Some(0));
    assert_eq!(fixture.metric_value("rouse_agent_connections_open", ""), Some(1));
    let buckets = format!("{DURATIONS}_bucket");
    let within = |le: &str| fixture.metric_value(&buckets, &format!("le=\"{le}\""));
    assert!(within("0.25").is_some_and(|count| count <= 9), "two take 300 ms at least");
    assert_eq!(within("+Inf"), Some(11));
    // Rouse's own histogram has finer buckets than Knative's, and the same count.
    let own_count = "rouse_agent_request_duration_seconds_count";
    assert_eq!(fixture.metric_value(own_count, ""), Some(11));
    assert_eq!(fixture.metric_value("rouse_agent_requests_cut_total", ""), Some(0));
    let mut unanswered = fixture.connect();
    unanswered.write_all(b"GET /hang HTTP/1.1\r\nHost: a\r\n\r\n").expect("an open connection");
    fixture.wait_metric_value("rouse_agent_requests_in_flight", 1);
    // The client closes with a reset.
    setsockopt(&unanswered, Linger, &libc::linger { l_onoff: 1, l_linger: 0 }).expect("a socket");
    drop(unanswered);
    fixture.wait_metric_value("rouse_agent_requests_cut_total", 1);
    assert_eq!(fixture.metric_value("rouse_agent_requests_in_flight", ""), Some(0));
    assert_eq!(fixture.wait_response_counts(11), [7, 3, 1], "it was not answered");
}

#[test]
fn a_revisions_counters_go_on_whichever_agents_and_pods_come_and_go() {
    let mut fixture = server_fixture("figures-on", Duration::from_secs(300));
    let ask_once =
        |fixture: &AgentFixture, path: &str| send_and_measure(&mut fixture.connect(), path);
    ask_once(&fixture, "/quick");
    ask_once(&fixture, "/missing");
    assert_eq!(fixture.wait_response_counts(2), [1, 1, 0]);
    fixture.kill_agent();
    ask_once(&fixture, "/failed");
    fixture.start_agent();
    assert_eq!(fixture.wait_response_counts(3), [1, 1, 1], "counted while no agent ran");
    fixture.wait_pod("ready", |pod| pod.ready);
    fixture.replace_pod();
    ask_once(&fixture, "/quick");
    assert_eq!(
        fixture.wait_response_counts(4),
        [2, 1, 1],
        "what the gone pod has left, and the new one's"
    );
    fixture.kill_agent();
    fixture.start_agent();
    assert_eq!(fixture.wait_response_counts(4), [2, 1, 1], "nothing twice, nothing lost");
    let name = NamespacedName::new("default", "hello-00001");
    fixture.routes.remove(&RouteKey::Pod("uid-1".into()));
    fixture.routes.remove(&RouteKey::Revision(name));
    let deadline = Instant::now() + WAIT_TIMEOUT;
    while fixture.metrics().contains(DURATIONS) && fixture.metrics().contains(REVISION_LABELS) {
        assert!(Instant::now() < deadline, "it is shown for ever");
        thread::sleep(Duration::from_millis(10));
    }
}
