//! Pass-through implementations for wrappers of streams.

/// Implements [`AsyncWrite`](tokio::io::AsyncWrite) for a wrapper that passes writes to its inner stream. The
/// arguments are the generics, the type, a name, and the patterns that bind the name to the inner stream: one
/// for a struct, one for each variant of an enum.
///
/// Every method is passed on, including vectored writes, whose default implementations copy.
///
/// ```
/// struct Named<S> {
///     stream: S,
///     name: String,
/// }
///
/// websocket::write_through!([S: tokio::io::AsyncWrite + Unpin] Named<S>, stream in Self { stream, .. });
/// ```
#[macro_export]
macro_rules! write_through {
    ([$($generics:tt)*] $stream:ty, $held:ident in $($pattern:pat),+ $(,)?) => {
        impl<$($generics)*> ::tokio::io::AsyncWrite for $stream {
            fn poll_write(
                self: ::std::pin::Pin<&mut Self>,
                cx: &mut ::std::task::Context<'_>,
                buf: &[u8],
            ) -> ::std::task::Poll<::std::io::Result<usize>> {
                match self.get_mut() {
                    $($pattern => ::tokio::io::AsyncWrite::poll_write(::std::pin::Pin::new($held), cx, buf),)+
                }
            }

            fn poll_flush(
                self: ::std::pin::Pin<&mut Self>,
                cx: &mut ::std::task::Context<'_>,
            ) -> ::std::task::Poll<::std::io::Result<()>> {
                match self.get_mut() {
                    $($pattern => ::tokio::io::AsyncWrite::poll_flush(::std::pin::Pin::new($held), cx),)+
                }
            }

            fn poll_shutdown(
                self: ::std::pin::Pin<&mut Self>,
                cx: &mut ::std::task::Context<'_>,
            ) -> ::std::task::Poll<::std::io::Result<()>> {
                match self.get_mut() {
                    $($pattern => ::tokio::io::AsyncWrite::poll_shutdown(::std::pin::Pin::new($held), cx),)+
                }
            }

            fn poll_write_vectored(
                self: ::std::pin::Pin<&mut Self>,
                cx: &mut ::std::task::Context<'_>,
                bufs: &[::std::io::IoSlice<'_>],
            ) -> ::std::task::Poll<::std::io::Result<usize>> {
                match self.get_mut() {
                    $($pattern => {
                        ::tokio::io::AsyncWrite::poll_write_vectored(::std::pin::Pin::new($held), cx, bufs)
                    })+
                }
            }

            fn is_write_vectored(&self) -> bool {
                match self {
                    $($pattern => ::tokio::io::AsyncWrite::is_write_vectored($held),)+
                }
            }
        }
    };
}

/// Implements [`AsyncRead`](tokio::io::AsyncRead) for a wrapper that passes reads to its inner stream. The
/// arguments are those of [`write_through!`].
#[macro_export]
macro_rules! read_through {
    ([$($generics:tt)*] $stream:ty, $held:ident in $($pattern:pat),+ $(,)?) => {
        impl<$($generics)*> ::tokio::io::AsyncRead for $stream {
            fn poll_read(
                self: ::std::pin::Pin<&mut Self>,
                cx: &mut ::std::task::Context<'_>,
                buf: &mut ::tokio::io::ReadBuf<'_>,
            ) -> ::std::task::Poll<::std::io::Result<()>> {
                match self.get_mut() {
                    $($pattern => ::tokio::io::AsyncRead::poll_read(::std::pin::Pin::new($held), cx, buf),)+
                }
            }
        }
    };
}
