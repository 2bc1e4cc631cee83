use super::*;

const START: UnixMillis = UnixMillis(1_000_000);

fn name(name: &str) -> NamespacedName {
    NamespacedName::new("team", name)
}

fn digest_request(images: &[(&str, &str)]) -> DigestRequest {
    DigestRequest {
        account: PullAccount { namespace: "team".into(), ..PullAccount::default() },
        images: images.iter().map(|&(a, b)| (a.to_owned(), b.to_owned())).collect(),
        skipped_registries: ["ko.local".to_owned()].into(),
        timeout: Duration::from_secs(10),
    }
}

fn query_images(jobs: &[DueDigestQuery]) -> Vec<&str> {
    jobs.iter().map(|it| it.query.image.as_str()).collect()
}

#[test]
fn images_that_need_no_registry_are_resolved_at_once() {
    let mut queue = DigestQueue::new(4);
    let digest = format!("ghcr.io/a@sha256:{}", "a".repeat(64));
    let status = queue.request_digests(
        &name("a"),
        digest_request(&[("c", &digest), ("d", "ko.local/x:v1")]),
        START,
    );
    let want = vec![("c".to_owned(), digest), ("d".to_owned(), String::new())];
    assert_eq!(status, DigestStatus::Resolved(want));
    assert_eq!((queue.start_due(START), queue.next_due()), (vec![], None));
    let failed = queue.request_digests(&name("b"), digest_request(&[("c", "not an image")]), START);
    let DigestStatus::Failed(why) = failed else { panic!("{failed:?}") };
    let begin = "Unable to fetch image \"not an image\": failed to resolve image to digest: failed \
                 to parse image name \"not an image\" into a tag: ";
    assert!(why.starts_with(begin), "{why}");
}

#[test]
fn a_revision_is_resolved_once_all_its_images_are() {
    let mut queue = DigestQueue::new(4);
    let images = &[("init", "reg.io/a:v1"), ("main", "reg.io/b:v1"), ("side", "reg.io/a:v1")];
    assert_eq!(
        queue.request_digests(&name("r"), digest_request(images), START),
        DigestStatus::Pending
    );
    let jobs = queue.start_due(START);
    assert_eq!(jobs.len(), 2);
    assert_eq!(
        queue.request_digests(&name("r"), digest_request(images), START),
        DigestStatus::Pending
    );
    assert_eq!(queue.start_due(START), []);
    let changed = queue.finish(&jobs[0].query, Ok("a@1".into()), START);
    assert_eq!((changed, queue.status(&name("r"))), (vec![name("r")], DigestStatus::Pending));
    queue.finish(&jobs[1].query, Ok("b@1".into()), START);
    let pairs = [("init", "a@1"), ("main", "b@1"), ("side", "a@1")];
    let want = pairs.map(|(a, b)| (a.to_owned(), b.to_owned())).to_vec();
    assert_eq!(queue.status(&name("r")), DigestStatus::Resolved(want));
    queue.forget(&name("r"));
    assert_eq!((queue.status(&name("r")), queue.lengths()), (DigestStatus::Unknown, (0, 0)));
}

#[test]
fn equal_queries_are_sent_once_and_other_accounts_send_their_own() {
    let mut queue = DigestQueue::new(9);
    let image = &[("c", "reg.io/a:v1")];
    let mut other = digest_request(image);
    other.account.pull_secrets = vec!["mine".into()];
    queue.request_digests(&name("a"), digest_request(image), START);
    queue.request_digests(&name("b"), digest_request(image), START);
    queue.request_digests(&name("c"), other, START);
    let jobs = queue.start_due(START);
    assert_eq!(jobs.len(), 2);
    let plain = jobs.iter().find(|it| it.query.account.pull_secrets.is_empty()).unwrap();
    let changed = queue.finish(&plain.query, Ok("a@1".into()), START);
    assert_eq!(changed, [name("a"), name("b")]);
    assert_eq!(queue.status(&name("c")), DigestStatus::Pending);
    // A tag may have moved, so a later Revision sends a new query.
    assert_eq!(
        queue.request_digests(&name("d"), digest_request(image), START),
        DigestStatus::Pending
    );
    assert_eq!(queue.start_due(START).len(), 1);
}

#[test]
fn parallel_queries_are_limited() {
    let mut queue = DigestQueue::new(2);
    for it in 0..5 {
        let image = format!("reg.io/a:v{it}");
        queue.request_digests(&name(&format!("r{it}")), digest_request(&[("c", &image)]), START);
    }
    let first = queue.start_due(START);
    assert_eq!(query_images(&first), ["reg.io/a:v0", "reg.io/a:v1"]);
    assert_eq!(queue.start_due(START), []);
    queue.finish(&first[0].query, Ok("x".into()), START);
    queue.forget(&name("r2"));
    assert_eq!(query_images(&queue.start_due(START)), ["reg.io/a:v3"]);
}

#[test]
fn a_failure_is_reported_and_retried_with_growing_delays() {
    let mut queue = DigestQueue::new(1);
    let revision = name("r");
    queue.request_digests(&revision, digest_request(&[("c", "reg.io/a:v1")]), START);
    let mut now = START;
    let mut delays = Vec::new();
    for round in 0..13 {
        let jobs = queue.start_due(now);
        assert_eq!(jobs.len(), 1);
        let changed = queue.finish(&jobs[0].query, Err("no route".into()), now);
        assert_eq!(changed.is_empty(), round > 0, "the same failure is told once");
        let next = queue.next_due().unwrap();
        delays.push(next.0 - now.0);
        assert_eq!(queue.start_due(UnixMillis(next.0 - 1)), []);
        now = next;
    }
    for (round, delay) in delays.iter().enumerate() {
        let most = (1000 << round).min(1_000_000);
        assert!((most * 9 / 10..=most).contains(delay), "{round}: {delay}");
    }
    let why = "Unable to fetch image \"reg.io/a:v1\": failed to resolve image to digest: no route";
    assert_eq!(queue.status(&revision), DigestStatus::Failed(why.into()));
    let job = queue.start_due(now).remove(0);
    assert_eq!(queue.finish(&job.query, Ok("a@1".into()), now), [name("r")]);
    let want = vec![("c".to_owned(), "a@1".to_owned())];
    assert_eq!((queue.status(&revision), queue.next_due()), (DigestStatus::Resolved(want), None));
}

#[test]
fn a_result_without_waiting_revision_is_dropped() {
    let mut queue = DigestQueue::new(1);
    queue.request_digests(&name("r"), digest_request(&[("c", "reg.io/a:v1")]), START);
    let job = queue.start_due(START).remove(0);
    queue.forget(&name("r"));
    assert_eq!(queue.finish(&job.query, Err("late".into()), START), []);
    assert_eq!((queue.lengths(), queue.next_due()), ((0, 0), None));
}

#[test]
fn a_changed_request_starts_again() {
    let mut queue = DigestQueue::new(1);
    queue.request_digests(&name("r"), digest_request(&[("c", "reg.io/a:v1")]), START);
    let job = queue.start_due(START).remove(0);
    queue.request_digests(&name("r"), digest_request(&[("c", "reg.io/b:v1")]), START);
    assert_eq!(queue.finish(&job.query, Ok("a@1".into()), START), []);
    assert_eq!(query_images(&queue.start_due(START)), ["reg.io/b:v1"]);
}
