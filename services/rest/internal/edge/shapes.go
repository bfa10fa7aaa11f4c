package edge

import (
	"strings"

	"google.golang.org/genproto/googleapis/api/annotations"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	weftv1 "weft.dev/weft/services/rest/gen/weft/v1"
	"weft.dev/weft/services/rest/internal/apierror"
)

// shapes are the error shapes that services declare, by the fixed beginnings of their paths. So a
// request without a route, or one that ends before it is routed, also gets its API's shape. What all
// paths of a service begin with is its own.
type shapes map[string]apierror.Shape

func readShapes(file protoreflect.FileDescriptor) shapes {
	found := shapes{}
	for i := range file.Services().Len() {
		service := file.Services().Get(i)
		declared, ok := proto.GetExtension(service.Options(), weftv1.E_ErrorShape).(*weftv1.ErrorShape)
		if !ok || declared == nil {
			continue
		}
		shape := apierror.Shape{
			Body: declared.GetBody(), Event: declared.GetEvent(), Types: map[int]string{},
			IDHeader: declared.GetIdHeader(),
		}
		for _, kind := range declared.GetTypes() {
			shape.Types[int(kind.GetStatus())] = kind.GetType()
		}
		var paths []string
		for j := range service.Methods().Len() {
			options := service.Methods().Get(j).Options()
			rule, _ := proto.GetExtension(options, annotations.E_Http).(*annotations.HttpRule)
			if path := pathOf(rule); path != "" {
				fixed, _, _ := strings.Cut(path, "/{")
				found[fixed] = shape
				paths = append(paths, fixed)
			}
		}
		if common := commonFolder(paths); common != "" {
			found[common] = shape
		}
	}
	return found
}

// commonFolder is the longest beginning that all paths share, in whole parts.
func commonFolder(paths []string) string {
	if len(paths) == 0 {
		return ""
	}
	common := paths[0]
	for _, path := range paths[1:] {
		for !strings.HasPrefix(path+"/", common+"/") {
			common = common[:strings.LastIndexByte(common, '/')]
		}
	}
	return common
}

func pathOf(rule *annotations.HttpRule) string {
	for _, path := range []string{rule.GetGet(), rule.GetPost(), rule.GetPut(), rule.GetDelete()} {
		if path != "" {
			return path
		}
	}
	return ""
}

// of is the shape for a path: that of the longest beginning that is known.
func (s shapes) of(path string) apierror.Shape {
	for path != "" {
		if shape, ok := s[path]; ok {
			return shape
		}
		path = path[:strings.LastIndexByte(path, '/')+1]
		path = strings.TrimSuffix(path, "/")
	}
	return apierror.Shape{}
}
