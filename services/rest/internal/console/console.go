// Package console serves the mesh's console, a page of plain ES modules without a build step. All
// that it shows comes from MeshService and the chat API, which check the caller: its files hold no
// secrets.
package console

import (
	"crypto/sha256"
	"embed"
	"encoding/hex"
	"fmt"
	"io/fs"
	"mime"
	"net/http"
	"path"

	"github.com/grpc-ecosystem/grpc-gateway/v2/runtime"

	"weft.dev/weft/services/rest/internal/apierror"
)

// Nothing but the page's own files runs or is loaded, no markup is made of strings, and no other page
// may frame it.
const policy = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; " +
	"connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; " +
	"require-trusted-types-for 'script'; trusted-types 'none'"

const indexName = "index.html"

//go:embed static
var static embed.FS

type file struct {
	content []byte
	kind    string
	etag    string
}

// Register adds /console and the files below it.
func Register(mux *runtime.ServeMux) error {
	files, err := read()
	if err != nil {
		return err
	}
	page := func(w http.ResponseWriter, r *http.Request, params map[string]string) {
		name := params["name"]
		if name == "" {
			name = indexName
		}
		found, ok := files[name]
		if !ok {
			apierror.New(http.StatusNotFound, "unknown_url", "The console has no such file.").
				For(r.Context()).Write(w)
			return
		}
		found.serve(w, r)
	}
	for _, pattern := range []string{"/console", "/console/{name=**}"} {
		if err := mux.HandlePath(http.MethodGet, pattern, page); err != nil {
			return fmt.Errorf("registering %s: %w", pattern, err)
		}
	}
	return nil
}

// read gives the files by their paths below /console.
func read() (map[string]file, error) {
	files := map[string]file{}
	root, err := fs.Sub(static, "static")
	if err != nil {
		return nil, err
	}
	err = fs.WalkDir(root, ".", func(name string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() {
			return err
		}
		content, err := fs.ReadFile(root, name)
		if err != nil {
			return err
		}
		sum := sha256.Sum256(content)
		files[name] = file{content, kindOf(name), `"` + hex.EncodeToString(sum[:16]) + `"`}
		return nil
	})
	return files, err
}

// kindOf does not ask the machine's own table, which may lack the types, for those that matter.
func kindOf(name string) string {
	switch path.Ext(name) {
	case ".js":
		return "text/javascript; charset=utf-8"
	case ".css":
		return "text/css; charset=utf-8"
	case ".html":
		return "text/html; charset=utf-8"
	case ".svg":
		return "image/svg+xml"
	}
	if kind := mime.TypeByExtension(path.Ext(name)); kind != "" {
		return kind
	}
	return "text/plain; charset=utf-8"
}

func (f file) serve(w http.ResponseWriter, r *http.Request) {
	header := w.Header()
	header.Set("Content-Security-Policy", policy)
	header.Set("X-Content-Type-Options", "nosniff")
	header.Set("Referrer-Policy", "no-referrer")
	header.Set("Cross-Origin-Opener-Policy", "same-origin")
	header.Set("Cross-Origin-Resource-Policy", "same-origin")
	// A page of another version must not meet this one's modules.
	header.Set("Cache-Control", "no-cache")
	header.Set("ETag", f.etag)
	if r.Header.Get("If-None-Match") == f.etag {
		w.WriteHeader(http.StatusNotModified)
		return
	}
	header.Set("Content-Type", f.kind)
	_, _ = w.Write(f.content)
}
