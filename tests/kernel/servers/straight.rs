//! Shell: the direct path: a request to a service's address gets the pod's own response. The activator's tests send
//! the same inputs on the other paths.

use std::{env, ffi::OsStr, fs, time::Duration};

use common::wire::ConnectionPath as Way;
use tokio::{runtime::Builder, time::timeout};

use super::{
    own::RequestCount,
    proxies,
    stage::{ServerFixture, ServerRecipe, poll_until},
};
use crate::{
    actor::{self, ScriptedProcess},
    bed::SERVING_PORT,
};

#[path = "../../../activator/tests/loopback/inputs/mod.rs"]
mod inputs;

use inputs::{
    ComparedResponse, Http1RequestCase, Http2RequestCase, encode_head, http1_cases, http2_cases,
    is_refused, over_http2, parse_response,
};

/// Shell script that sends a file to an address and a port, and prints the response until the server closes. Both at
/// once, because a server may answer before it has read everything.
const ASK_SCRIPT: &str =
    "exec 3<>\"/dev/tcp/$1/$2\" || exit 1; cat \"$3\" >&3 & cat <&3; kill $!; wait";
const SERVICE: &str = "10.96.0.1";
const ROLE: &str = "ROUSE_TEST_ASKER";
/// Prefix of a result that is no response but a reason.
const FAILURE_PREFIX: &str = "failed: ";
/// Timeout of a response.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(20);

/// A request in words, and its response in words.
type DescribedResponse = (String, String);
/// Function that sends each input to a server.
type RequestSender = fn(&ServerFixture, (&str, u16)) -> Vec<DescribedResponse>;

/// Sends raw bytes to a server and returns its response.
fn send_raw(
    stage: &ServerFixture,
    (ip, port): (&str, u16),
    input: &Http1RequestCase,
) -> ComparedResponse {
    let file = stage.path("input");
    fs::write(&file, [encode_head(input), vec![b'x'; input.3]].concat()).unwrap();
    let (port, file) = (port.to_string(), file.display().to_string());
    let words = ["timeout", "20", "bash", "-c", ASK_SCRIPT, "bash", ip, &port, &file];
    let done = stage.netns_command(&stage.client, &words).output().unwrap();
    parse_response(&done.stdout)
}

/// Main function of this program as an HTTP/2 client; not a test itself. A line has an address and the number of an
/// input.
#[test]
#[ignore = "a role, run by the other tests"]
fn role() {
    if env::var_os(ROLE).is_none() {
        return;
    }
    let runtime = Builder::new_current_thread().enable_all().build().unwrap();
    let inputs = http2_cases();
    actor::run_steps(|words| {
        let input = &inputs[words[1].parse::<usize>().unwrap()];
        let asked = over_http2(words[0].parse().unwrap(), input);
        Ok(match runtime.block_on(async { timeout(RESPONSE_TIMEOUT, asked).await }) {
            Ok(Ok(told)) => format!("{told:?}"),
            Ok(Err(error)) => format!("{FAILURE_PREFIX}{error:?}"),
            Err(late) => format!("{FAILURE_PREFIX}{late}"),
        })
    });
}

fn send_http1(stage: &ServerFixture, at: (&str, u16)) -> Vec<DescribedResponse> {
    let answered = |input: Http1RequestCase| {
        let bytes = encode_head(&input);
        let what = bytes[..bytes.len().min(60)].escape_ascii().to_string();
        let told = send_raw(stage, at, &input);
        // Some servers answer inputs that no server may accept, others close the connection.
        assert!(is_refused(&input) || !told.status.is_empty(), "{} {at:?}: {what}", stage.server);
        (what, format!("{told:?}"))
    };
    http1_cases().into_iter().map(answered).collect()
}

fn send_http2(stage: &ServerFixture, at: (&str, u16)) -> Vec<DescribedResponse> {
    send_chosen_http2(stage, at, |_target| true)
}

/// Sends all inputs but the one that is answered before its body is read: hypercorn then closes the connection, and a
/// reset for unread data may overtake the response, with or without Rouse.
fn send_fully_read_http2(stage: &ServerFixture, at: (&str, u16)) -> Vec<DescribedResponse> {
    send_chosen_http2(stage, at, |target| target != "/early")
}

fn send_chosen_http2(
    stage: &ServerFixture,
    (ip, port): (&str, u16),
    is_asked: fn(&str) -> bool,
) -> Vec<DescribedResponse> {
    let (cgroup, netns) = (&stage.client.cgroup, &stage.client.netns);
    let role = (ROLE, OsStr::new("1"));
    let mut asker = ScriptedProcess::start_role("servers::straight::role", role, cgroup, netns);
    let answered = |(which, (method, target, _, sent)): (usize, Http2RequestCase)| {
        let what = format!("{method} {target} {sent:?}");
        let told = asker.expect_step(&format!("{ip}:{port} {which}"));
        assert!(!told.starts_with(FAILURE_PREFIX), "{} {ip}:{port}: {what}: {told}", stage.server);
        (what, told)
    };
    let inputs = http2_cases().into_iter().enumerate();
    inputs.filter(|(_, (_, target, ..))| is_asked(target)).map(answered).collect()
}

/// Responses of a server outside the pods' cgroup, by its own address: no program reads its packets.
fn responses_without_programs(
    server: &'static str,
    recipe: impl Fn(&ServerFixture) -> ServerRecipe,
    asks: &[RequestSender],
) -> Vec<DescribedResponse> {
    let mut stage = ServerFixture::new(server);
    stage.pod = stage.fixture.add_client();
    start_server(&mut stage, recipe);
    asks.iter().flat_map(|ask| ask(&stage, (&stage.pod.ipv4(), SERVING_PORT))).collect()
}

/// Responses of a server in a pod, by the address of its service.
fn responses_on_direct_path(
    server: &'static str,
    recipe: impl Fn(&ServerFixture) -> ServerRecipe,
    asks: &[RequestSender],
) -> Vec<DescribedResponse> {
    let mut stage = ServerFixture::new(server);
    stage.fixture.add_service(1, Way::Direct);
    stage.fixture.add_ready_pod(&stage.pod, 1);
    stage.fixture.apply_table();
    start_server(&mut stage, recipe);
    let answers: Vec<_> = asks.iter().flat_map(|ask| ask(&stage, (SERVICE, 80))).collect();
    // The programs have read every request and every response; otherwise the comparison would prove nothing.
    let all = RequestCount { begun: answers.len() as u64, ended: answers.len() as u64 };
    assert!(
        poll_until(|| stage.kernel_count() == all),
        "{server}: {all:?}, counted {:?}",
        stage.kernel_count()
    );
    answers
}

fn start_server(stage: &mut ServerFixture, recipe: impl Fn(&ServerFixture) -> ServerRecipe) {
    let recipe = recipe(stage);
    stage.start_backends();
    stage.start(&recipe);
}

fn assert_same_responses(
    server: &'static str,
    recipe: impl Fn(&ServerFixture) -> ServerRecipe,
    asks: &[RequestSender],
) {
    let own = responses_without_programs(server, &recipe, asks);
    for (told, own) in responses_on_direct_path(server, &recipe, asks).into_iter().zip(own) {
        assert_eq!(told, own, "{server}");
    }
}

#[test]
fn by_a_services_address_comes_its_pods_own_answer() {
    assert_same_responses("nginx", |stage| proxies::nginx(stage, ""), &[send_http1]);
    assert_same_responses("Go net/http", |stage| stage.go("http"), &[send_http1, send_http2]);
    assert_same_responses("Node http", |stage| stage.node("http"), &[send_http1]);
    let words = ["/usr/bin/uvicorn", "--host", "0.0.0.0", "--port", "8080", "app:asgi"];
    assert_same_responses("uvicorn", |stage| stage.python(&words), &[send_http1]);
}

#[test]
fn by_a_services_address_comes_its_pods_own_answer_of_http2() {
    assert_same_responses("nginx (h2)", |stage| proxies::nginx(stage, "http2"), &[send_http2]);
    assert_same_responses("Node http2", |stage| stage.node("h2"), &[send_http2]);
    let words = ["/usr/bin/hypercorn", "--bind", "0.0.0.0:8080", "app:asgi"];
    assert_same_responses("hypercorn (h2)", |stage| stage.python(&words), &[send_fully_read_http2]);
}
