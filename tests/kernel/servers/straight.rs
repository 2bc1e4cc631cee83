//! Shell: the direct path: what a client sends to a service's address gets the pod's own answer. The activator's tests ask
//! with the same inputs on the other paths.

use std::{fmt::Debug, fs};

use common::wire::Path as Way;

use super::{
    proxies,
    stage::{Recipe, Stage},
};
use crate::bed::SERVING;

#[path = "../../../activator/tests/inputs/mod.rs"]
mod inputs;

use inputs::{Input, Told, head, inputs, is_refused, told};

/// Sends a file to an address and a port, and writes what comes back until the server closes. Both at once, as a server may
/// answer before it has read all.
const ASK: &str = "exec 3<>\"/dev/tcp/$1/$2\" || exit 1; cat \"$3\" >&3 & cat <&3; kill $!; wait";
const SERVICE: &str = "10.96.0.1";

/// What HTTP/2 can say, in curl's words.
const HTTP2: [&str; 6] = [
    "{url}/hello",
    "{url}/none?q=a|b",
    "--head {url}/hello",
    "--data-binary hello {url}/echo",
    "--request DELETE --data-binary hello {url}/echo",
    "--request GET --data-binary hello {url}/echo",
];

fn scene(server: &'static str, recipe: impl FnOnce(&Stage) -> Recipe) -> Stage {
    let mut stage = Stage::new(server);
    stage.bed.service(1, Way::Direct);
    stage.bed.ready(&stage.pod, 1);
    stage.bed.plan();
    let recipe = recipe(&stage);
    stage.start_behind();
    stage.start(&recipe);
    stage
}

/// The pod's answer to raw bytes, by either of its addresses.
fn raw(stage: &Stage, (ip, port): (&str, u16), input: &Input) -> Told {
    let file = stage.file("input");
    fs::write(&file, [head(input), vec![b'x'; input.3]].concat()).unwrap();
    let (port, file) = (port.to_string(), file.display().to_string());
    let words = ["timeout", "20", "bash", "-c", ASK, "bash", ip, &port, &file];
    let done = stage.inside(&stage.client, &words).output().unwrap();
    told(&done.stdout)
}

/// The pod's answer to curl, by either of its addresses.
fn curl(stage: &Stage, (ip, port): (&str, u16), words: &str) -> String {
    let words = words.replace("{url}", &format!("http://{ip}:{port}"));
    let common = ["curl", "-sS", "--http2-prior-knowledge", "-m", "20"];
    let told = ["-H", "Host: hello", "-w", "%{http_code} %{http_version}"];
    let words: Vec<&str> = common.into_iter().chain(told).chain(words.split(' ')).collect();
    let done = stage.inside(&stage.client, &words).output().unwrap();
    let lines = String::from_utf8_lossy(&done.stdout).into_owned();
    // Heads name the moment at which they were made.
    lines.lines().filter(|line| !line.starts_with("date:")).collect::<Vec<_>>().join("\n")
}

/// The pod's answer by its own address, which is the one by the service's.
fn compared<T: PartialEq + Debug>(stage: &Stage, what: &str, ask: impl Fn((&str, u16)) -> T) -> T {
    let own = ask((&stage.pod.four(), SERVING));
    assert_eq!(ask((SERVICE, 80)), own, "{}: {what}", stage.server);
    own
}

fn compare_http1(stage: &Stage) {
    for input in inputs() {
        let bytes = head(&input);
        let what = bytes[..bytes.len().min(60)].escape_ascii().to_string();
        let told = compared(stage, &what, |at| raw(stage, at, &input));
        // Some servers answer what no server may take, others close.
        assert!(is_refused(&input) || !told.status.is_empty(), "{}: {what}", stage.server);
    }
}

fn compare_http2(stage: &Stage) {
    for words in HTTP2 {
        let told = compared(stage, words, |at| curl(stage, at, words));
        assert!(told.ends_with(" 2"), "{}: {words}: {told}", stage.server);
    }
}

#[test]
fn by_a_services_address_comes_its_pods_own_answer() {
    let nginx = scene("nginx", |stage| proxies::nginx(stage, ""));
    compare_http1(&nginx);
    drop(nginx);
    let go = scene("Go net/http", |stage| stage.go("http"));
    compare_http1(&go);
    compare_http2(&go);
    drop(go);
    let node = scene("Node http", |stage| stage.node("http"));
    compare_http1(&node);
    drop(node);
    let words = ["/usr/bin/uvicorn", "--host", "0.0.0.0", "--port", "8080", "app:asgi"];
    compare_http1(&scene("uvicorn", |stage| stage.python(&words)));
}

#[test]
fn by_a_services_address_comes_its_pods_own_answer_of_http2() {
    compare_http2(&scene("nginx (h2)", |stage| proxies::nginx(stage, "http2")));
    compare_http2(&scene("Node http2", |stage| stage.node("h2")));
    let words = ["/usr/bin/hypercorn", "--bind", "0.0.0.0:8080", "app:asgi"];
    compare_http2(&scene("hypercorn (h2)", |stage| stage.python(&words)));
}
