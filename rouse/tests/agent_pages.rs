//! Shell: `rouse services` and `rouse trace`, as programs, with agents behind an API server that knows a few paths only.

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
const CLIENT: &str = "/api/v1/namespaces/shop/pods/web-1";

/// Returns the list of the agents' pods on the nodes n1 and n2.
fn agents() -> (&'static str, u16, String) {
    let pods = ["n1", "n2"].map(|node| {
        json!({"metadata": {"name": format!("agent-{node}")}, "status": {"phase": "Running"},
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
