//! Shell: the direct path: a request to a service's address gets the pod's own response. The activator's tests send
//! the same inputs on the other paths.

use std::{env, ffi::OsStr, fs, time::Duration};

use common::wire::ConnectionPath;
use tokio::{runtime::Builder, time::timeout};

use super::{
    proxies,
    server_counts::RequestCount,
    server_fixture::{ServerFixture, ServerRecipe, poll_until},
};
use crate::{
    fixture::SERVING_PORT,
    scripted_process::{self, ScriptedProcess},
};

#[path = "../../../activator/tests/loopback/inputs/mod.rs"]
mod inputs;

use inputs::{
    ComparedResponse, Http1RequestCase, Http2RequestCase, encode_head, http1_cases, http2_cases,
    is_refused, over_http2, parse_response,
};

/// Shell script that sends a file to an address and a port, and prints the response until the server closes. Both at
/// once, because a server may respond before it has read everything.
const SEND_FILE_SCRIPT: &str =
    "exec 3<>\"/dev/tcp/$1/$2\" || exit 1; cat \"$3\" >&3 & cat <&3; kill $!; wait";
const SERVICE: &str = "10.96.0.1";
const ROLE: &str = "ROUSE_TEST_ASKER";
/// Prefix of a result that is no response but a reason.
const FAILURE_PREFIX: &str = "failed: ";
/// Timeout of a response.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(120);

/// A request in words, and its response in words.
type DescribedResponse = (String, String);
/// Function that sends each input to a server.
type RequestSender = fn(&ServerFixture, (&str, u16)) -> Vec<DescribedResponse>;

/// Sends raw bytes to a server and returns its response.
fn send_raw(
    fixture: &ServerFixture,
    (ip, port): (&str, u16),
    input: &Http1RequestCase,
) -> ComparedResponse {
    let file = fixture.path("input");
    fs::write(&file, [encode_head(input), vec![b'x'; input.3]].concat()).unwrap();
    let (port, file) = (port.to_string(), file.display().to_string());
    let args = ["timeout", "120", "bash", "-c", SEND_FILE_SCRIPT, "bash", ip, &port, &file];
    let output = fixture.netns_command(&fixture.client, &args).output().unwrap();
    parse_response(&output.stdout)
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
    scripted_process::run_steps(|words| {
        let input = &inputs[words[1].parse::<usize>().unwrap()];
        let request = over_http2(words[0].parse().unwrap(), input);
        Ok(match runtime.block_on(async { timeout(RESPONSE_TIMEOUT, request).await }) {
            Ok(Ok(response)) => format!("{response:?}"),
            Ok(Err(error)) => format!("{FAILURE_PREFIX}{error:?}"),
            Err(elapsed) => format!("{FAILURE_PREFIX}{elapsed}"),
        })
    });
}

fn send_http1(fixture: &ServerFixture, address: (&str, u16)) -> Vec<DescribedResponse> {
    let send = |input: Http1RequestCase| {
        let bytes = encode_head(&input);
        let description = bytes[..bytes.len().min(60)].escape_ascii().to_string();
        let response = send_raw(fixture, address, &input);
        // Some servers respond to invalid requests, others close the connection.
        assert!(
            is_refused(&input) || !response.status.is_empty(),
            "{} {address:?}: {description}",
            fixture.server
        );
        (description, format!("{response:?}"))
    };
    http1_cases().into_iter().map(send).collect()
}

fn send_http2(fixture: &ServerFixture, address: (&str, u16)) -> Vec<DescribedResponse> {
    send_chosen_http2(fixture, address, |_target| true)
}

/// Sends all inputs except the one whose response comes before its body is read. For that one, hypercorn closes the
/// connection, and a reset for unread data may overtake the response, with or without Rouse.
fn send_fully_read_http2(fixture: &ServerFixture, address: (&str, u16)) -> Vec<DescribedResponse> {
    send_chosen_http2(fixture, address, |target| target != "/early")
}

fn send_chosen_http2(
    fixture: &ServerFixture,
    (ip, port): (&str, u16),
    is_chosen: fn(&str) -> bool,
) -> Vec<DescribedResponse> {
    let (cgroup, netns) = (&fixture.client.cgroup, &fixture.client.netns);
    let role = (ROLE, OsStr::new("1"));
    let mut client = ScriptedProcess::start_role("servers::direct_path::role", role, cgroup, netns);
    let send = |(case, (method, target, _, sent)): (usize, Http2RequestCase)| {
        let description = format!("{method} {target} {sent:?}");
        let response = client.expect_step(&format!("{ip}:{port} {case}"));
        assert!(
            !response.starts_with(FAILURE_PREFIX),
            "{} {ip}:{port}: {description}: {response}",
            fixture.server
        );
        (description, response)
    };
    let inputs = http2_cases().into_iter().enumerate();
    inputs.filter(|(_, (_, target, ..))| is_chosen(target)).map(send).collect()
}

/// Responses of a server outside the pods' cgroup, by its own address: no program reads its packets.
fn responses_without_programs(
    server: &'static str,
    recipe: impl Fn(&ServerFixture) -> ServerRecipe,
    senders: &[RequestSender],
) -> Vec<DescribedResponse> {
    let mut fixture = ServerFixture::new(server);
    fixture.pod = fixture.kernel.add_client();
    start_server(&mut fixture, recipe);
    senders.iter().flat_map(|send| send(&fixture, (&fixture.pod.ipv4(), SERVING_PORT))).collect()
}

/// Responses of a server in a pod, by the address of its service.
fn responses_on_direct_path(
    server: &'static str,
    recipe: impl Fn(&ServerFixture) -> ServerRecipe,
    senders: &[RequestSender],
) -> Vec<DescribedResponse> {
    let mut fixture = ServerFixture::new(server);
    fixture.kernel.add_service(1, ConnectionPath::Direct);
    fixture.kernel.add_ready_pod(&fixture.pod, 1);
    fixture.kernel.apply_table();
    start_server(&mut fixture, recipe);
    let responses: Vec<_> = senders.iter().flat_map(|send| send(&fixture, (SERVICE, 80))).collect();
    // The programs have read every request and every response; otherwise the comparison would prove nothing.
    let total = RequestCount { begun: responses.len() as u64, ended: responses.len() as u64 };
    assert!(
        poll_until(|| fixture.kernel_count() == total),
        "{server}: {total:?}, counted {:?}",
        fixture.kernel_count()
    );
    responses
}

fn start_server(fixture: &mut ServerFixture, recipe: impl Fn(&ServerFixture) -> ServerRecipe) {
    let recipe = recipe(fixture);
    fixture.start_backends();
    fixture.start(&recipe);
}

fn assert_same_responses(
    server: &'static str,
    recipe: impl Fn(&ServerFixture) -> ServerRecipe,
    senders: &[RequestSender],
) {
    let expected = responses_without_programs(server, &recipe, senders);
    let responses = responses_on_direct_path(server, &recipe, senders);
    for (response, expected) in responses.into_iter().zip(expected) {
        assert_eq!(response, expected, "{server}");
    }
}

#[test]
fn the_direct_path_gives_the_same_responses_as_a_server_without_programs() {
    assert_same_responses("nginx", |fixture| proxies::nginx(fixture, ""), &[send_http1]);
    assert_same_responses("Go net/http", |fixture| fixture.go("http"), &[send_http1, send_http2]);
    assert_same_responses("Node http", |fixture| fixture.node("http"), &[send_http1]);
    let args = ["/usr/bin/uvicorn", "--host", "0.0.0.0", "--port", "8080", "app:asgi"];
    assert_same_responses("uvicorn", |fixture| fixture.python(&args), &[send_http1]);
}

#[test]
fn the_direct_path_gives_the_same_http2_responses_as_a_server_without_programs() {
    assert_same_responses("nginx (h2)", |fixture| proxies::nginx(fixture, "http2"), &[send_http2]);
    assert_same_responses("Node http2", |fixture| fixture.node("h2"), &[send_http2]);
    let args = ["/usr/bin/hypercorn", "--bind", "0.0.0.0:8080", "app:asgi"];
    assert_same_responses(
        "hypercorn (h2)",
        |fixture| fixture.python(&args),
        &[send_fully_read_http2],
    );
}
