// Package identity keeps a certificate that may be replaced while the edge runs.
package identity

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"sync"
	"time"
)

// Domain is the domain of services in certificates: the gateway is gateway.weft.internal.
const Domain = "weft.internal"

const lookEvery = time.Second

// Files are PEM files.
type Files struct {
	Cert, Key string
	// CA has the authorities that are trusted; empty where no peer is checked.
	CA string
}

type material struct {
	certificate *tls.Certificate
	authorities *x509.CertPool
}

type stamp struct {
	modified time.Time
	size     int64
}

// Identity has the content of the files as read last. While the files do not fit together, as in
// the middle of a rotation, the previous content stays in use.
type Identity struct {
	files  Files
	logger *slog.Logger

	mutex    sync.Mutex
	nextLook time.Time
	seen     [3]stamp
	current  material
}

// Load reads the files; an error names the file.
func Load(files Files, logger *slog.Logger) (*Identity, error) {
	i := &Identity{files: files, logger: logger, seen: look(files)}
	current, err := read(files)
	if err != nil {
		return nil, err
	}
	i.current = current
	return i, nil
}

// Client is a configuration for calls to a service of the mesh. The peer must have a certificate
// of a trusted authority that names the service; its host does not matter.
func (i *Identity) Client(service string) *tls.Config {
	name := service + "." + Domain
	return &tls.Config{
		MinVersion: tls.VersionTLS13,
		ServerName: name,
		GetClientCertificate: func(*tls.CertificateRequestInfo) (*tls.Certificate, error) {
			return i.get().certificate, nil
		},
		// The standard check keeps the authorities of its start. VerifyConnection does the same check
		// with the current authorities, for every connection.
		InsecureSkipVerify: true,
		VerifyConnection: func(state tls.ConnectionState) error {
			return verify(state.PeerCertificates, i.get().authorities, name)
		},
	}
}

// Server is a configuration for HTTPS to clients that have no certificate.
func (i *Identity) Server() *tls.Config {
	return &tls.Config{
		MinVersion: tls.VersionTLS12,
		GetCertificate: func(*tls.ClientHelloInfo) (*tls.Certificate, error) {
			return i.get().certificate, nil
		},
	}
}

func (i *Identity) get() material {
	i.mutex.Lock()
	defer i.mutex.Unlock()
	if now := time.Now(); now.After(i.nextLook) {
		i.nextLook = now.Add(lookEvery)
		i.reread()
	}
	return i.current
}

func (i *Identity) reread() {
	seen := look(i.files)
	if seen == i.seen {
		return
	}
	current, err := read(i.files)
	if err != nil {
		i.logger.Warn("the certificate is not re-read yet", "cause", err.Error())
		return
	}
	i.seen, i.current = seen, current
	i.logger.Info("certificate re-read", "certificate", i.files.Cert)
}

func look(files Files) (seen [3]stamp) {
	for n, path := range []string{files.Cert, files.Key, files.CA} {
		if info, err := os.Stat(path); err == nil {
			seen[n] = stamp{info.ModTime(), info.Size()}
		}
	}
	return seen
}

func read(files Files) (material, error) {
	// Errors of the tls package do not quote the files.
	certificate, err := tls.LoadX509KeyPair(files.Cert, files.Key)
	if err != nil {
		return material{}, fmt.Errorf("%s, %s: %w", files.Cert, files.Key, err)
	}
	if files.CA == "" {
		return material{certificate: &certificate}, nil
	}
	pem, err := os.ReadFile(files.CA)
	if err != nil {
		return material{}, err
	}
	authorities := x509.NewCertPool()
	if !authorities.AppendCertsFromPEM(pem) {
		return material{}, fmt.Errorf("%s: no PEM certificate", files.CA)
	}
	return material{&certificate, authorities}, nil
}

func verify(chain []*x509.Certificate, authorities *x509.CertPool, name string) error {
	if len(chain) == 0 {
		return errors.New("the peer has no certificate")
	}
	intermediates := x509.NewCertPool()
	for _, certificate := range chain[1:] {
		intermediates.AddCert(certificate)
	}
	_, err := chain[0].Verify(x509.VerifyOptions{
		DNSName:       name,
		Roots:         authorities,
		Intermediates: intermediates,
	})
	return err
}

// Warn logs while the certificate is near its end, until ctx ends.
func (i *Identity) Warn(ctx context.Context, before, every time.Duration) {
	ticker := time.NewTicker(every)
	defer ticker.Stop()
	for {
		if leaf := i.get().certificate.Leaf; leaf != nil && time.Until(leaf.NotAfter) < before {
			i.logger.Warn("renew the certificate", "certificate", i.files.Cert, "ends", leaf.NotAfter)
		}
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
	}
}
