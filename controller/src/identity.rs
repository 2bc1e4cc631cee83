//! Shell: the Identity service: a token in, a certificate out.
//!
//! | file | |
//! |---|---|
//! | [`claim`] | Pure: what the API server says of a token → whom a certificate speaks for |
//! | [`rotation`] | Pure: which authority signs, and when there is another |
//! | [`sign`] | Shell: keys and certificates |
//! | [`keep`] | Shell: authorities in the cluster, the controller's own certificate |
//! | [`kube`] | Shell: TokenReview, Secret and ConfigMap |
//!
//! Asking needs no certificate, so everything about a request is bounded: its size, how many are looked at at once, and how
//! long the API server may take. What is refused is refused with a sentence, and says nothing of what would do.

use std::{
    sync::Arc,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use common::{
    link::Door,
    tls::accept::Bounds,
    wire::raw::{
        IssueReply, IssueRequest,
        identity_server::{Identity, IdentityServer},
    },
};
use tokio::{sync::Semaphore, time::timeout};
use tonic::{Request, Response, Status};
use tracing::{info, warn};

pub mod claim;
pub mod keep;
pub mod kube;
pub mod rotation;
pub mod sign;

use claim::Reviewed;
use keep::{Keeper, StoreError};

/// A projected token is a JWT of about 1 KiB.
const TOKEN_BYTES: usize = 8 << 10;
/// A request for a P-256 key is about 300 bytes.
const REQUEST_BYTES: usize = 2 << 10;
/// Both, and what protobuf adds. More is not even read.
const MESSAGE_BYTES: usize = TOKEN_BYTES + REQUEST_BYTES + 1_024;
/// So many are asked of the API server at once.
const AT_ONCE: usize = 16;
/// How long one may wait for its turn, and for the API server.
const PATIENCE: Duration = Duration::from_secs(5);

/// Says whose a token is.
#[tonic::async_trait]
pub trait Reviewer: Send + Sync + std::fmt::Debug {
    /// Whose it is, as the API server has it.
    async fn review(&self, token: &str) -> Result<Reviewed, StoreError>;
}

/// Issues certificates.
#[derive(Debug)]
pub struct Issuer {
    keeper: Arc<Keeper>,
    reviewer: Arc<dyn Reviewer>,
    namespace: String,
    turns: Semaphore,
}

impl Issuer {
    /// An issuer for the parts that run in `namespace`.
    pub fn new(keeper: Arc<Keeper>, reviewer: Arc<dyn Reviewer>, namespace: &str) -> Arc<Self> {
        let (namespace, turns) = (namespace.to_owned(), Semaphore::new(AT_ONCE));
        Arc::new(Self { keeper, reviewer, namespace, turns })
    }

    /// The gRPC service.
    pub fn service(self: &Arc<Self>) -> IdentityServer<Service> {
        let service = IdentityServer::new(Service(Arc::clone(self)));
        service.max_decoding_message_size(MESSAGE_BYTES)
    }

    /// Who is let in: also those who have no certificate yet.
    pub fn door(&self) -> Door {
        let credentials = Arc::clone(self.keeper.credentials());
        Door { credentials, open: true, bounds: Bounds::default() }
    }

    async fn issue(&self, request: IssueRequest) -> Result<IssueReply, Status> {
        if request.token.len() > TOKEN_BYTES || request.request.len() > REQUEST_BYTES {
            return Err(Status::invalid_argument("token or request is too large"));
        }
        let signing = self.keeper.signing();
        let signing = signing.ok_or_else(|| Status::unavailable("no authority yet: try again"))?;
        let turn = timeout(PATIENCE, self.turns.acquire()).await;
        let _turn =
            turn.map_err(|_elapsed| Status::resource_exhausted("too many ask: try again"))?;
        let review = timeout(PATIENCE, self.reviewer.review(&request.token)).await;
        let review = review.unwrap_or_else(|_elapsed| Err("the API server did not answer".into()));
        let reviewed = review.map_err(|error| {
            warn!(error, "token not reviewed");
            Status::unavailable("the token could not be reviewed: try again")
        })?;
        let identity = claim::identity(&reviewed, &self.namespace).map_err(|refusal| {
            warn!(%refusal, "certificate refused");
            Status::unauthenticated(refusal.to_string())
        })?;
        let signed = signing.signer.sign(&request.request, &identity, SystemTime::now());
        let (certificate, end) = signed.map_err(|error| {
            warn!(%identity, error = %common::link::chain(&error), "request refused");
            Status::invalid_argument("the request holds no key that could be signed")
        })?;
        info!(%identity, "certificate issued");
        let end = end.duration_since(UNIX_EPOCH).unwrap_or_default().as_millis();
        Ok(IssueReply {
            chain: vec![certificate.to_vec()],
            authorities: signing.authorities.iter().map(|it| it.to_vec()).collect(),
            not_after_ms: u64::try_from(end).unwrap_or(u64::MAX),
        })
    }
}

/// The Identity service of an [`Issuer`].
#[derive(Debug)]
pub struct Service(Arc<Issuer>);

#[tonic::async_trait]
impl Identity for Service {
    async fn issue(&self, request: Request<IssueRequest>) -> Result<Response<IssueReply>, Status> {
        self.0.issue(request.into_inner()).await.map(Response::new)
    }
}

#[cfg(test)]
mod tests;
