//! Shell: `rouse services`, `rouse routes` and `rouse trace`, as programs, with agents and activators behind an API server
//! that knows a few paths only.

use std::{
    fs,
    io::{BufRead as _, BufReader, Write as _},
    net::{TcpListener, TcpStream},
    path::PathBuf,
    process::Command,
    thread,
};

use serde_json::{Value, json};

/// Responses of the API server: path without its query, status and body.
type Responses = Vec<(&'static str, u16, String)>;

/// Kubeconfig that leads to an API server of this test. The file is removed at the end of the test.
struct ScriptedApiServer(PathBuf);

impl ScriptedApiServer {
    fn start(test: &str, responses: Responses) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let server = format!("http://{}", listener.local_addr().expect("bound"));
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                respond(stream, &responses);
            }
        });
        let named = |key: &str, value: Value| json!([{"name": "test", key: value}]);
        let kubeconfig = json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "test",
            "clusters": named("cluster", json!({"server": server})),
            "users": named("user", json!({})),
            "contexts": named("context", json!({"cluster": "test", "user": "test"})),
        });
        let file = std::env::temp_dir().join(format!("rouse-{test}-{}", std::process::id()));
        fs::write(&file, kubeconfig.to_string()).expect("a file");
        Self(file)
    }

    /// Runs the program against this cluster; returns its exit code, standard output and standard error.
    fn rouse(&self, args: &[&str]) -> (Option<i32>, String, String) {
        let mut command = Command::new(env!("CARGO_BIN_EXE_rouse"));
        command.args(args).arg("--kubeconfig").arg(&self.0).env_remove("ROUSE_NODE");
        let output = command.output().expect("it starts");
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("text");
        (output.status.code(), text(output.stdout), text(output.stderr))
    }
}

impl Drop for ScriptedApiServer {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

/// Reads one request and responds to it. A path that is not known gets the API server's 404.
fn respond(mut stream: TcpStream, responses: &Responses) {
    let mut lines = BufReader::new(&stream).lines().map_while(Result::ok);
    let request = lines.next().unwrap_or_default();
    lines.take_while(|line| !line.is_empty()).for_each(drop);
    let target = request.split(' ').nth(1).unwrap_or_default();
    let path = target.split('?').next().unwrap_or_default();
    let missing = status(404, "NotFound", "no such path").to_string();
    let found = responses.iter().find(|(it, ..)| *it == path);
    let (code, body) = found.map_or((404, missing.as_str()), |(_, code, body)| (*code, body));
    let head = format!("content-length: {}\r\nconnection: close", body.len());
    let _ = write!(stream, "HTTP/1.1 {code} x\r\n{head}\r\n\r\n{body}");
}

fn status(code: u16, reason: &str, message: &str) -> Value {
    json!({"apiVersion": "v1", "kind": "Status", "status": "Failure", "code": code,
           "reason": reason, "message": message})
}

const AGENTS: &str = "/api/v1/namespaces/knative-serving/pods";
const SERVICES: &str = "/api/v1/namespaces/knative-serving/pods/agent-n1:7104/proxy/debug/services";
const TRACE: &str = "/api/v1/namespaces/knative-serving/pods/agent-n2:7104/proxy/debug/trace";
const ROUTES: &str = "/api/v1/namespaces/knative-serving/pods/activator-n1:7103/proxy/debug/routes";
const REQUEST_TRACE: &str =
    "/api/v1/namespaces/knative-serving/pods/activator-n1:7103/proxy/debug/trace";
const CLIENT: &str = "/api/v1/namespaces/shop/pods/web-1";

/// Returns the list of the agents' pods on the nodes n1 and n2.
fn agents() -> (&'static str, u16, String) {
    component_pods("agent")
}

/// Returns the list of a component's pods on the nodes n1 and n2. The API server of these tests ignores the selector.
fn component_pods(component: &str) -> (&'static str, u16, String) {
    let pods = ["n1", "n2"].map(|node| {
        json!({"metadata": {"name": format!("{component}-{node}")}, "status": {"phase": "Running"},
               "spec": {"nodeName": node, "containers": []}})
    });
    let list = json!({"apiVersion": "v1", "kind": "PodList", "metadata": {}, "items": pods});
    (AGENTS, 200, list.to_string())
}

#[test]
fn services_of_a_node_are_listed_through_the_api_server() {
    let facts = json!({
        "node": {"name": "n1", "zone": "a", "clusterip": "all"},
        "services": [
            {"namespace": "shop", "name": "cart", "source": "service", "address": "10.96.0.9:80",
             "protocol": "TCP", "mode": "pods", "listed": 2, "known": 3},
            {"namespace": "other", "name": "db", "source": "service", "address": "10.96.0.8:80",
             "protocol": "TCP", "mode": "refuse", "listed": 0, "known": 0},
        ],
    });
    let responses = vec![agents(), (SERVICES, 200, facts.to_string())];
    let server = ScriptedApiServer::start("services", responses);
    let expected = "\
NAME   ADDRESS            MODE   ENDPOINTS   AFFINITY   SOURCE
cart   10.96.0.9:80/TCP   pods   2/3         -          service
";
    let (code, out, error) = server.rouse(&["services", "-n", "shop"]);
    assert_eq!((code, out.as_str(), error.as_str()), (Some(0), expected, ""), "the first node");
    let (code, out, _) = server.rouse(&["services", "-A", "-o", "json", "--node", "n1"]);
    let parsed: Value = serde_json::from_str(&out).expect("JSON");
    assert_eq!((code, parsed["services"].as_array().map(Vec::len)), (Some(0), Some(2)));
    let (code, out, error) = server.rouse(&["services", "--node", "n9"]);
    assert_eq!((code, out.as_str()), (Some(1), ""));
    assert_eq!(error, "error: no agent is on node n9: agents run on n1, n2\n");
}

#[test]
fn a_trace_asks_the_agent_of_the_pod_that_connects() {
    let pod = json!({"metadata": {"name": "web-1"}, "spec": {"nodeName": "n2", "containers": []}});
    let facts = json!({
        "node": {"name": "n2", "zone": "b", "clusterip": "all"}, "to": "10.96.0.9:80",
        "protocol": "TCP", "outcome": "refused", "reason": "no endpoint is ready",
    });
    let responses = vec![agents(), (CLIENT, 200, pod.to_string()), (TRACE, 200, facts.to_string())];
    let server = ScriptedApiServer::start("trace", responses);
    let from = ["trace", "10.96.0.9:80", "--from", "pod/web-1", "-n", "shop"];
    let (code, out, error) = server.rouse(&from);
    assert_eq!((code, error.as_str()), (Some(0), ""), "{out}");
    assert!(out.starts_with("Connect from pod web-1 on node n2 (zone b) to 10.96.0.9:80/TCP\n"));
    assert!(out.contains("  Reason:     no endpoint is ready\n"), "{out}");
    let (code, _, error) = server.rouse(&["trace", "10.96.0.9:80"]);
    assert_eq!(code, Some(1));
    assert!(error.contains("--node NODE") && error.ends_with("n1, n2\n"), "{error}");
    let (code, _, error) = server.rouse(&["trace", "10.96.0.9:80", "--from", "pod/gone"]);
    assert_eq!(code, Some(1));
    assert_eq!(error, "Error from server (NotFound): pods \"gone\" not found\n");
    let (code, _, error) = server.rouse(&["trace", "None:80"]);
    assert_eq!(code, Some(1));
    assert!(error.contains("\"None:80\"") && error.contains("10.96.0.10:53"), "{error}");
}

#[test]
fn what_is_in_the_way_is_named_with_what_to_do() {
    let ask = |test: &str, code: u16, body: String| {
        let server = ScriptedApiServer::start(test, vec![agents(), (SERVICES, code, body)]);
        let (code, out, error) = server.rouse(&["services", "--node", "n1"]);
        assert_eq!((code, out.as_str()), (Some(1), ""), "{error}");
        error
    };
    let older = ask("older", 404, String::new());
    assert!(older.contains("of a version without this page"), "{older}");
    let forbidden = status(403, "Forbidden", "pods \"agent-n1\" is forbidden").to_string();
    let forbidden = ask("forbidden", 403, forbidden);
    assert!(forbidden.contains("is forbidden") && forbidden.contains("pods/proxy"), "{forbidden}");
    let busy = ask("busy", 503, "the agent does not answer now\n".to_owned());
    assert_eq!(busy, "error: the agent does not answer now\n");
    let newer = ask("newer", 200, "{\"node\": {}}".to_owned());
    assert!(newer.contains("another version than this command"), "{newer}");
}

#[test]
fn hosts_and_requests_are_asked_of_one_activator_which_is_named() {
    let activator = json!({"name": "activator-n1", "node": "n1", "zone": "a", "routesVersion": 7});
    let routes = json!({
        "activator": activator, "allHosts": 1, "isCut": false, "revisions": [], "certificates": [],
        "hosts": [{"host": "shop.example", "rule": "route", "service": "default/shop",
                   "path": "direct", "targets": [{"revision": "default/shop-1", "percent": 100}]}],
        "connections": {"opening": 0, "http1": 0, "http2": 0, "tcp": 0, "tls": 0},
        "edge": {"trustedProxies": [], "requiresProxyProtocol": false, "allowedUpgrades": [],
                 "allowsUnderscores": false},
    });
    let trace = json!({
        "activator": activator, "host": "shop.example", "path": "/", "entrypoint": "outside",
        "isTls": false, "outcome": "refused", "status": 404, "reason": "no service", "rules": [],
    });
    let responses = vec![
        component_pods("activator"),
        (ROUTES, 200, routes.to_string()),
        (REQUEST_TRACE, 200, trace.to_string()),
    ];
    let server = ScriptedApiServer::start("routes", responses);
    let (code, out, error) = server.rouse(&["routes"]);
    let expected = "\
HOST           RULE    REVISION         PERCENT   PODS   WAITING   CERTIFICATE
shop.example   route   default/shop-1   100       -      -         -
";
    assert_eq!((code, out.as_str()), (Some(0), expected), "{error}");
    assert_eq!(error, "Waiting requests are those at activator activator-n1 on node n1, zone a.\n");
    let (code, out, _) = server.rouse(&["routes", "-o", "json"]);
    let parsed: Value = serde_json::from_str(&out).expect("JSON");
    assert_eq!((code, &parsed["hosts"][0]["host"]), (Some(0), &json!("shop.example")));
    let (code, out, error) = server.rouse(&["trace", "shop.example"]);
    assert_eq!((code, error.as_str()), (Some(0), ""), "{out}");
    assert!(out.starts_with("Request for shop.example/ at activator activator-n1 on node n1"));
    assert!(out.contains("  Result:      is refused with status 404\n"), "{out}");
}

#[test]
fn the_subject_of_a_trace_decides_on_its_options() {
    let server = ScriptedApiServer::start("subject", vec![agents()]);
    let cases: [(&[&str], &str); 6] = [
        (&["trace", "10.96.0.1"], "is an address without a port"),
        (&["trace", "shop.example:80"], "nor a host without a port"),
        (&["trace", "10.96.0.1:80", "/a"], "are for requests to a host"),
        (&["trace", "10.96.0.1:80", "--tls"], "are for requests to a host"),
        (&["trace", "shop.example", "--protocol", "tcp"], "are for connects to an address"),
        (&["trace", "shop.example", "--from", "pod/web-1"], "are for connects to an address"),
    ];
    for (args, expected) in cases {
        let (code, out, error) = server.rouse(args);
        assert_eq!((code, out.as_str()), (Some(1), ""), "{args:?}");
        assert!(error.starts_with("error: ") && error.contains(expected), "{args:?}: {error}");
    }
    for args in [&["trace", "a.b", "c"][..], &["trace", "a.b", "--entrypoint", "0"][..]] {
        assert_eq!(server.rouse(args).0, Some(2), "{args:?}");
    }
}

#[test]
fn an_activator_that_cannot_be_reached_is_named_with_what_to_do() {
    let ask = |test: &str, responses| {
        let server = ScriptedApiServer::start(test, responses);
        let (code, out, error) = server.rouse(&["routes", "--node", "n1"]);
        assert_eq!((code, out.as_str()), (Some(1), ""), "{error}");
        error
    };
    let message = "error trying to reach service: dial tcp 10.244.1.4:7103: i/o timeout";
    let closed = status(503, "ServiceUnavailable", message).to_string();
    let closed = ask("closed", vec![component_pods("activator"), (ROUTES, 503, closed)]);
    assert!(closed.contains("does not reach the activator activator-n1"), "{closed}");
    let forward = "kubectl port-forward -n knative-serving activator-n1 7103";
    assert!(closed.contains(message) && closed.contains(forward), "{closed}");
    let empty = json!({"apiVersion": "v1", "kind": "PodList", "metadata": {}, "items": []});
    let none = ask("none", vec![(AGENTS, 200, empty.to_string())]);
    assert!(none.contains("no activator is in namespace knative-serving"), "{none}");
    assert!(none.contains("rouse install"), "{none}");
}
