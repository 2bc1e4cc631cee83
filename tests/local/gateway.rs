//! Third-party clients at the gateway: HTTP/2 with prior knowledge, beginning with a sleeping service.
//!
//! Scenario of the test in [`crate::service_lifecycle`].

use std::process::{Command, Stdio};

use tests::rouse_node::RouseNode;

const HOST: &str = "http2.default.localhost";

/// Output of a command that must succeed.
fn run_ok(command: &mut Command) -> String {
    let output = command.stderr(Stdio::inherit()).output().expect("curl and h2load are installed");
    assert!(output.status.success(), "{command:?}: {output:?}");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

pub(super) fn curl_and_h2load_speak_http2_with_a_service_that_slept(node: &RouseNode) {
    let manifest = include_str!("../../examples/hello.yaml");
    assert!(node.apply(&manifest.replace("name: hello", "name: http2")).0);
    node.wait_ready("http2");
    node.wait_asleep("http2");
    let (ip, port) = (node.gateway.ip(), node.gateway.port());
    let url = format!("http://{HOST}:{port}/");
    let curl = || {
        let mut curl = Command::new("curl");
        curl.args(["--silent", "--show-error", "--noproxy", "*", "--max-time", "60"]);
        curl.args(["--connect-to", &format!("{HOST}:{port}:{ip}:{port}")]);
        curl.args(["--output", "/dev/null", "--write-out", "%{http_code} %{http_version}"]);
        curl
    };
    assert_eq!(run_ok(curl().args(["--http2-prior-knowledge", &url])), "200 2");
    assert_eq!(run_ok(curl().args(["--http1.1", &url])), "200 1.1");
    let unknown = ["--http2-prior-knowledge", "--header", "Host: other.example", &url];
    assert_eq!(run_ok(curl().args(unknown)), "404 2");
    let mut h2load = Command::new("h2load");
    h2load.args(["-n", "2000", "-c", "4", "-m", "16", "--connect-to", &format!("{ip}:{port}")]);
    let output = run_ok(h2load.arg(&url));
    assert!(output.contains("2000 succeeded, 0 failed, 0 errored, 0 timeout"), "{output}");
}
