//! The baseline: a server on bare `h2` that answers the same calls with the same bytes and does nothing else.
//!
//! Its cost is the least cost of any server on these libraries. It has no deadlines, no limits and no errors
//! beyond those that the benchmark provokes, and trusts its clients.

mod service;

use std::ffi::OsString;
use std::future::poll_fn;
use std::io::Read as _;
use std::sync::Arc;
use std::task::{Context, Poll};

use anyhow::{Context as _, Result};
use bytes::{Bytes, BytesMut};
use h2::RecvStream;
use h2::server::{Connection, SendResponse};
use tokio::net::{TcpListener, TcpStream};

use service::Service;

/// The first argument with which this program becomes the baseline server.
pub const ARGUMENT: &str = "--floor";

/// Runs the server. The arguments are the number of tasks, the number of threads, and whether tasks are
/// recoverable.
pub fn main(mut arguments: impl Iterator<Item = OsString>) -> Result<()> {
    let mut number = || -> Result<usize> {
        Ok(arguments.next().context("a number is missing")?.to_string_lossy().parse()?)
    };
    let tasks = u32::try_from(number()?)?;
    let threads = number()?;
    let service = Arc::new(Service::new(tasks, arguments.next().is_some()));
    std::thread::spawn(|| {
        // The end of the pipe shows that the parent has ended.
        drop(std::io::stdin().read_to_end(&mut Vec::new()));
        std::process::exit(0);
    });
    let mut builder = match threads {
        1 => tokio::runtime::Builder::new_current_thread(),
        _ => tokio::runtime::Builder::new_multi_thread(),
    };
    if threads > 1 {
        builder.worker_threads(threads);
    }
    builder.enable_all().build()?.block_on(async {
        let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None)?;
        socket.bind(&std::net::SocketAddr::from(([127, 0, 0, 1], 0)).into())?;
        socket.listen(4096)?;
        socket.set_nonblocking(true)?;
        let listener = TcpListener::from_std(socket.into())?;
        println!("READY port={}", listener.local_addr()?.port());
        loop {
            let (stream, _) = listener.accept().await?;
            tokio::spawn(serve(stream, Arc::clone(&service)));
        }
    })
}

async fn serve(stream: TcpStream, service: Arc<Service>) {
    // The load generator reports a failed connection.
    drop(serve_connection(stream, service).await);
}

async fn serve_connection(stream: TcpStream, service: Arc<Service>) -> Result<()> {
    stream.set_nodelay(true)?;
    let mut connection = h2::server::Builder::new()
        .initial_window_size(4 << 20)
        .initial_connection_window_size(4 << 20)
        .max_frame_size(4 << 20)
        .handshake(stream)
        .await?;
    let mut arriving = Vec::new();
    poll_fn(|context| poll_connection(context, &mut connection, &mut arriving, &service)).await
}

/// A request that may be incomplete.
struct Arriving {
    method: String,
    stream: RecvStream,
    body: Body,
    respond: SendResponse<Bytes>,
}

/// The parts of a body; most have one.
#[derive(Default)]
enum Body {
    #[default]
    Empty,
    One(Bytes),
    Many(BytesMut),
}

impl Body {
    fn push(self, piece: Bytes) -> Self {
        match self {
            Self::Empty => Self::One(piece),
            Self::One(first) => {
                let mut many = BytesMut::from(first);
                many.extend_from_slice(&piece);
                Self::Many(many)
            }
            Self::Many(mut many) => {
                many.extend_from_slice(&piece);
                Self::Many(many)
            }
        }
    }

    fn whole(self) -> Bytes {
        match self {
            Self::Empty => Bytes::new(),
            Self::One(piece) => piece,
            Self::Many(many) => many.freeze(),
        }
    }
}

/// Reads input and sends output, without a task or a wakeup for each request.
fn poll_connection(
    context: &mut Context<'_>,
    connection: &mut Connection<TcpStream, Bytes>,
    arriving: &mut Vec<Arriving>,
    service: &Service,
) -> Poll<Result<()>> {
    loop {
        let closed = loop {
            match connection.poll_accept(context) {
                Poll::Ready(Some(accepted)) => {
                    let (request, respond) = accepted?;
                    let (head, stream) = request.into_parts();
                    let method = head.uri.path().rsplit('/').next().unwrap_or_default().to_owned();
                    arriving.push(Arriving { method, stream, body: Body::Empty, respond });
                }
                Poll::Ready(None) => break true,
                Poll::Pending => break false,
            }
        };
        if closed {
            return Poll::Ready(Ok(()));
        }
        let mut progress = false;
        let mut index = 0;
        while index < arriving.len() {
            if poll_body(context, &mut arriving[index])? {
                let whole = arriving.swap_remove(index);
                service.answer(&whole.method, whole.body.whole(), whole.respond)?;
                progress = true;
            } else {
                index += 1;
            }
        }
        if !progress {
            return Poll::Pending;
        }
        // Another round sends the new answers, and reads what has arrived meanwhile.
    }
}

fn poll_body(context: &mut Context<'_>, request: &mut Arriving) -> Result<bool> {
    loop {
        match request.stream.poll_data(context) {
            Poll::Ready(Some(piece)) => {
                let piece = piece?;
                request.stream.flow_control().release_capacity(piece.len())?;
                request.body = std::mem::take(&mut request.body).push(piece);
                if request.stream.is_end_stream() {
                    return Ok(true);
                }
            }
            Poll::Ready(None) => return Ok(true),
            Poll::Pending => return Ok(false),
        }
    }
}
