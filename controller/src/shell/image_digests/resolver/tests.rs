use super::*;

/// An account whose secrets cannot be read, so that no query reaches a registry.
#[derive(Debug)]
struct FailingPullSecrets;

impl PullSecretSource for FailingPullSecrets {
    async fn pull_secrets(
        &self,
        account: &PullAccount,
    ) -> Result<Vec<PullSecret>, PullSecretError> {
        Err(format!("no access to namespace {}", account.namespace).into())
    }
}

fn digest_request(image: &str) -> DigestRequest {
    DigestRequest {
        account: PullAccount { namespace: "team".into(), ..PullAccount::default() },
        images: vec![("c".into(), image.into())],
        timeout: Duration::from_secs(10),
        ..DigestRequest::default()
    }
}

#[tokio::test(start_paused = true)]
async fn a_failed_revision_is_reported_and_retried_until_it_is_forgotten() {
    let (changed, mut heard) = mpsc::channel(8);
    let resolver = DigestResolver::new(FailingPullSecrets, RegistryClient::default(), changed);
    let shutdown = CancellationToken::new();
    let running = tokio::spawn(Arc::clone(&resolver).run(shutdown.clone()));
    let revision = NamespacedName::new("team", "r-00001");
    let image = "reg.io/a:v1";
    assert_eq!(resolver.request_digests(&revision, digest_request(image)), DigestStatus::Pending);
    assert_eq!(heard.recv().await, Some(revision.clone()));
    let why = "Unable to fetch image \"reg.io/a:v1\": failed to resolve image to digest: failed to \
               initialize authentication: no access to namespace team";
    assert_eq!(
        resolver.request_digests(&revision, digest_request(image)),
        DigestStatus::Failed(why.into())
    );
    tokio::time::sleep(Duration::from_secs(3600)).await;
    assert_eq!(resolver.queue_lengths(), (1, 1));
    // The same failure is not reported again.
    assert!(heard.try_recv().is_err());
    resolver.forget(&revision);
    assert_eq!(resolver.queue_lengths(), (0, 0));
    shutdown.cancel();
    running.await.unwrap();
}
