//! bare h2 server answering the same bytes
use bytes::Bytes;
#[tokio::main(flavor = "multi_thread", worker_threads = 2)]
async fn main() {
    let l = tokio::net::TcpListener::bind(std::env::args().nth(1).unwrap()).await.unwrap();
    loop {
        let (s, _) = l.accept().await.unwrap();
        s.set_nodelay(true).unwrap();
        tokio::spawn(async move {
            let mut c = match h2::server::Builder::new()
                .initial_window_size(2 << 20)
                .initial_connection_window_size(4 << 20)
                .max_frame_size(2 << 20)
                .handshake::<_, Bytes>(s)
                .await
            {
                Ok(c) => c,
                Err(_) => return,
            };
            while let Some(Ok((req, mut resp))) = c.accept().await {
                let (_, mut body) = req.into_parts();
                if std::env::var_os("NOBODY").is_none() {
                    while let Some(Ok(d)) = body.data().await {
                        let _ = body.flow_control().release_capacity(d.len());
                    }
                }
                let head =
                    http::Response::builder().header("content-type", "application/grpc").body(()).unwrap();
                if let Ok(mut st) = resp.send_response(head, false) {
                    let _ =
                        st.send_data(Bytes::from_static(&[0, 0, 0, 0, 9, 9, 1, 2, 3, 4, 5, 6, 7, 8]), false);
                    let mut t = http::HeaderMap::new();
                    t.insert("grpc-status", http::HeaderValue::from_static("0"));
                    let _ = st.send_trailers(t);
                }
            }
        });
    }
}
