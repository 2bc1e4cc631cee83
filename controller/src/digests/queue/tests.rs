use super::*;

const START: UnixMillis = UnixMillis(1_000_000);

fn name(name: &str) -> NamespacedName {
    NamespacedName::new("team", name)
}

fn wanted(images: &[(&str, &str)]) -> DigestRequest {
    DigestRequest {
        account: PullAccount { namespace: "team".into(), ..PullAccount::default() },
        images: images.iter().map(|&(a, b)| (a.to_owned(), b.to_owned())).collect(),
        skipped: ["ko.local".to_owned()].into(),
        timeout: Duration::from_secs(10),
    }
}

fn images(jobs: &[DueDigestQuery]) -> Vec<&str> {
    jobs.iter().map(|it| it.question.image.as_str()).collect()
}

#[test]
fn what_needs_no_registry_is_answered_at_once() {
    let mut queue = DigestQueue::new(4);
    let digest = format!("ghcr.io/a@sha256:{}", "a".repeat(64));
    let answer = queue.want(&name("a"), wanted(&[("c", &digest), ("d", "ko.local/x:v1")]), START);
    let want = vec![("c".to_owned(), digest), ("d".to_owned(), String::new())];
    assert_eq!(answer, DigestStatus::Resolved(want));
    assert_eq!((queue.start(START), queue.next()), (vec![], None));
    let failed = queue.want(&name("b"), wanted(&[("c", "not an image")]), START);
    let DigestStatus::Failed(why) = failed else { panic!("{failed:?}") };
    let begin = "Unable to fetch image \"not an image\": failed to resolve image to digest: failed \
                 to parse image name \"not an image\" into a tag: ";
    assert!(why.starts_with(begin), "{why}");
}

#[test]
fn a_revision_is_told_once_all_its_images_are_known() {
    let mut queue = DigestQueue::new(4);
    let images = &[("init", "reg.io/a:v1"), ("main", "reg.io/b:v1"), ("side", "reg.io/a:v1")];
    assert_eq!(queue.want(&name("r"), wanted(images), START), DigestStatus::Pending);
    let jobs = queue.start(START);
    assert_eq!(jobs.len(), 2);
    assert_eq!(queue.want(&name("r"), wanted(images), START), DigestStatus::Pending);
    assert_eq!(queue.start(START), []);
    let changed = queue.done(&jobs[0].question, Ok("a@1".into()), START);
    assert_eq!((changed, queue.answer(&name("r"))), (vec![name("r")], DigestStatus::Pending));
    queue.done(&jobs[1].question, Ok("b@1".into()), START);
    let pairs = [("init", "a@1"), ("main", "b@1"), ("side", "a@1")];
    let want = pairs.map(|(a, b)| (a.to_owned(), b.to_owned())).to_vec();
    assert_eq!(queue.answer(&name("r")), DigestStatus::Resolved(want));
    queue.forget(&name("r"));
    assert_eq!((queue.answer(&name("r")), queue.sizes()), (DigestStatus::Unknown, (0, 0)));
}

#[test]
fn equal_questions_are_asked_once_and_other_accounts_ask_for_themselves() {
    let mut queue = DigestQueue::new(9);
    let image = &[("c", "reg.io/a:v1")];
    let mut other = wanted(image);
    other.account.pull_secrets = vec!["mine".into()];
    queue.want(&name("a"), wanted(image), START);
    queue.want(&name("b"), wanted(image), START);
    queue.want(&name("c"), other, START);
    let jobs = queue.start(START);
    assert_eq!(jobs.len(), 2);
    let plain = jobs.iter().find(|it| it.question.account.pull_secrets.is_empty()).unwrap();
    let changed = queue.done(&plain.question, Ok("a@1".into()), START);
    assert_eq!(changed, [name("a"), name("b")]);
    assert_eq!(queue.answer(&name("c")), DigestStatus::Pending);
    // A tag may have moved, so a later Revision sends a new query.
    assert_eq!(queue.want(&name("d"), wanted(image), START), DigestStatus::Pending);
    assert_eq!(queue.start(START).len(), 1);
}

#[test]
fn only_so_many_are_asked_at_once() {
    let mut queue = DigestQueue::new(2);
    for it in 0..5 {
        let image = format!("reg.io/a:v{it}");
        queue.want(&name(&format!("r{it}")), wanted(&[("c", &image)]), START);
    }
    let first = queue.start(START);
    assert_eq!(images(&first), ["reg.io/a:v0", "reg.io/a:v1"]);
    assert_eq!(queue.start(START), []);
    queue.done(&first[0].question, Ok("x".into()), START);
    queue.forget(&name("r2"));
    assert_eq!(images(&queue.start(START)), ["reg.io/a:v3"]);
}

#[test]
fn a_failure_is_told_and_tried_again_ever_later() {
    let mut queue = DigestQueue::new(1);
    let revision = name("r");
    queue.want(&revision, wanted(&[("c", "reg.io/a:v1")]), START);
    let mut now = START;
    let mut delays = Vec::new();
    for round in 0..13 {
        let jobs = queue.start(now);
        assert_eq!(jobs.len(), 1);
        let changed = queue.done(&jobs[0].question, Err("no route".into()), now);
        assert_eq!(changed.is_empty(), round > 0, "the same failure is told once");
        let next = queue.next().unwrap();
        delays.push(next.0 - now.0);
        assert_eq!(queue.start(UnixMillis(next.0 - 1)), []);
        now = next;
    }
    for (round, delay) in delays.iter().enumerate() {
        let most = (1000 << round).min(1_000_000);
        assert!((most * 9 / 10..=most).contains(delay), "{round}: {delay}");
    }
    let why = "Unable to fetch image \"reg.io/a:v1\": failed to resolve image to digest: no route";
    assert_eq!(queue.answer(&revision), DigestStatus::Failed(why.into()));
    let job = queue.start(now).remove(0);
    assert_eq!(queue.done(&job.question, Ok("a@1".into()), now), [name("r")]);
    let want = vec![("c".to_owned(), "a@1".to_owned())];
    assert_eq!((queue.answer(&revision), queue.next()), (DigestStatus::Resolved(want), None));
}

#[test]
fn an_answer_nobody_waits_for_is_dropped() {
    let mut queue = DigestQueue::new(1);
    queue.want(&name("r"), wanted(&[("c", "reg.io/a:v1")]), START);
    let job = queue.start(START).remove(0);
    queue.forget(&name("r"));
    assert_eq!(queue.done(&job.question, Err("late".into()), START), []);
    assert_eq!((queue.sizes(), queue.next()), ((0, 0), None));
}

#[test]
fn a_revision_that_wants_something_else_begins_anew() {
    let mut queue = DigestQueue::new(1);
    queue.want(&name("r"), wanted(&[("c", "reg.io/a:v1")]), START);
    let job = queue.start(START).remove(0);
    queue.want(&name("r"), wanted(&[("c", "reg.io/b:v1")]), START);
    assert_eq!(queue.done(&job.question, Ok("a@1".into()), START), []);
    assert_eq!(images(&queue.start(START)), ["reg.io/b:v1"]);
}
